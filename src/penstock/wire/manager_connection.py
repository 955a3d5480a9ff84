"""Connects a gateway to managers in other processes."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import get_args

import grpc
import structlog
from google.protobuf.message import Message

from penstock.core.blocks import BlockState, BlockView, ClusterView, GatewayMember, OnClusterView
from penstock.core.cluster.access_view import NO_KEYS, AccessView
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.cluster.routes import BlockShare, NameRoute, Sticky
from penstock.core.errors import NameTaken, UnknownModel
from penstock.pb.v1 import access_pb2
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1.access_pb2_grpc import DirectStub
from penstock.pb.v1.manager_pb2_grpc import ManagerStub
from penstock.telemetry.background import BackgroundTasks
from penstock.wire.clocks import measure_clock_ahead
from penstock.wire.kept_view import KeptView, encode_view
from penstock.wire.leader_connection import LeaderClient, log_request_errors
from penstock.wire.plain_values import copy_fields
from penstock.wire.update_cursor import UpdateCursor, UpdateVerdict

log = structlog.get_logger()
REPORT_S = 1.0  # between a gateway's reports to the manager
KEEP_S = 1.0  # between two writes of the kept state
COUNTING_REPORT_S = 0.2  # between two reports while the gateway counts answers for rollouts
UNLOAD_TIMEOUT_S = 60.0
ROUTING_TIMEOUT_S = 10.0
DISCOVER_TIMEOUT_S = 15.0
LOAD_TIMEOUT_S = 86_400.0
LAST_REPORT_S = 0.02
MAX_NAME_CHARS = 128
CALLERS_KEY_HEADER = (
    "penstock-callers-key-bin"  # the caller's API key in a forwarded call; it replaces the channel's own key
)
ASKED_BY_HEADER = "penstock-asked-by-bin"  # the caller that the gateway authenticated, for the audit log


class ManagerConnection:
    """Implements core.blocks.Control with calls to the manager, and receives the manager's updates until `close`."""

    def __init__(
        self,
        leader: LeaderClient,
        member: GatewayMember,
        listener: OnClusterView,
        collect_block_counts: Callable[[], Sequence[AnswerCounts]] = list,
        collect_model_counts: Callable[[bool], Sequence[ModelAnswers]] = lambda is_all: (),
        count_sessions: Callable[[], Mapping[str, int]] = dict,
        kept_view: KeptView | None = None,
    ) -> None:
        """Watch the cluster, and report the figures that the three functions return to the manager.

        `collect_block_counts` returns the answers by block since its last call, for blocks of rollouts.
        `collect_model_counts` returns the answers by model since the process started, for all models or only for models
        whose counts changed since its last call. `count_sessions` returns the numbers of sessions. `kept_view` is the
        file in which to keep the last state.
        """
        self._leader = leader
        self._member = member
        self._incarnation = secrets.token_hex(8)
        self._listener = listener
        self._cursor = UpdateCursor()
        self._is_leaving = False
        self._is_lost = False  # an update was missed: request a snapshot
        self._collect_block_counts = collect_block_counts
        self._collect_model_counts = collect_model_counts
        self._count_sessions = count_sessions
        self._blocks: dict[str, BlockView] = {}
        self._routes: dict[str, NameRoute] = {}
        self._gateways: tuple[GatewayMember, ...] = ()
        self._membership = 0
        self._access = NO_KEYS
        self._records: dict[str, bytes] = {}
        self._workers_keys: tuple[str, ...] = ()
        self._report_now = asyncio.Event()
        self._kept_view = kept_view
        self._view_to_keep: pb.ClusterView | None = None
        self.refusal: NameTaken | None = None  # the manager's answer to the last call, if another gateway has the name
        self._tasks = BackgroundTasks("control")
        self._tasks.supervise("gateway-manager", lambda: leader.run_once(self._watch), deadline_s=None)
        if kept_view is not None:
            self._tasks.supervise("gateway-kept-state", self._write_kept, every=KEEP_S)

    @property
    def has_view(self) -> bool:
        """Return whether a manager has sent the state of the cluster."""
        return self._cursor.revision > 0

    def use_kept_view(self) -> bool:
        """Publish the state that an earlier process of this gateway kept; return False if no state was kept.

        The first state from a manager replaces the kept state completely.
        """
        if self._kept_view is None or self.has_view or (found := self._kept_view.read()) is None:
            return False
        view, age_s = found
        self._cursor.set(view.history, view.epoch)
        self._apply_update(view)
        log.warning(
            "kept_state_used",
            age_s=round(age_s),
            blocks=len(view.blocks),
            keys=len(view.keys),
            advice="no manager answers; keys revoked since then are refused once one does",
        )
        return True

    async def load(self, model: str, asked_by: str) -> None:
        _check_name(model)
        await self._call("Load", pb.LoadRequest(model=model), LOAD_TIMEOUT_S, asked_by)

    async def unload(self, model: str, asked_by: str) -> None:
        _check_name(model)
        await self._call("Unload", pb.UnloadRequest(model=model), UNLOAD_TIMEOUT_S, asked_by)

    async def set_routing(self, model: str, routing_json: str, asked_by: str) -> None:
        request = pb.SetRoutingRequest(model=model, routing=routing_json)
        await self._call("SetRouting", request, ROUTING_TIMEOUT_S, asked_by)

    async def discover(self, request: access_pb2.DiscoverRequest) -> access_pb2.DiscoverResponse:
        return await self._leader.call(
            lambda channel, left_s: DirectStub(channel).Discover(request, timeout=left_s), DISCOVER_TIMEOUT_S
        )

    async def close(self) -> None:
        self._is_leaving = True
        self._report_now.set()
        await asyncio.sleep(LAST_REPORT_S)  # time for the report to be sent
        await self._tasks.close()

    async def _call(self, method: str, request: Message, timeout_s: float, asked_by: str) -> None:
        metadata = ((ASKED_BY_HEADER, asked_by.encode()),)
        await self._leader.call(
            lambda channel, left_s: getattr(ManagerStub(channel), method)(request, timeout=left_s, metadata=metadata),
            timeout_s,
        )

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Receive updates from one leader. The last view of the cluster stays in use while no leader is known."""
        try:
            async for view in ManagerStub(channel).Watch(
                log_request_errors(self._generate_requests()), wait_for_ready=True
            ):
                if not self._receive_update(view):
                    break
        except grpc.aio.AioRpcError as error:
            is_taken = error.code() is grpc.StatusCode.ALREADY_EXISTS
            self.refusal = NameTaken(error.details() or self._member.gateway_id) if is_taken else None
            raise
        except Exception:
            self._is_lost = True  # a part of the update may have been applied: request a snapshot
            raise

    async def _generate_requests(self) -> AsyncIterator[pb.WatchRequest]:
        reported_at = 0.0  # when answers were last reported
        while True:
            self._report_now.clear()
            counts = self._collect_block_counts()
            answers: Sequence[ModelAnswers] = ()
            if time.monotonic() - reported_at >= REPORT_S:
                answers, reported_at = self._collect_model_counts(not reported_at), time.monotonic()
            request = pb.WatchRequest(
                gateway_id=self._member.gateway_id,
                endpoint=self._member.endpoint,
                address=self._member.address,
                incarnation=self._incarnation,
                history=self._cursor.history,
                epoch=self._cursor.epoch,
                revision=self._cursor.revision,
                is_lost=self._is_lost,
                is_leaving=self._is_leaving,
                counts=[pb.AnswerCounts(**asdict(each)) for each in counts],
                answers=[pb.ModelAnswers(**each._asdict()) for each in answers],
                sessions=pb.SessionCounts(**self._count_sessions()),
            )
            self._is_lost = False
            yield request
            with suppress(TimeoutError):
                await asyncio.wait_for(self._report_now.wait(), COUNTING_REPORT_S if counts else REPORT_S)

    def _receive_update(self, view: pb.ClusterView) -> bool:
        """Apply an update; return False if the update came from a manager that was replaced."""
        verdict = self._cursor.receive(view)
        if verdict is UpdateVerdict.MISSED:
            self._is_lost = True
            self._report_now.set()
        elif verdict is UpdateVerdict.DEPOSED:
            log.warning("deposed_manager_ignored", epoch=view.epoch, newest=self._cursor.epoch)
        if verdict is not UpdateVerdict.ACCEPTED:
            return verdict is UpdateVerdict.MISSED
        found = self._apply_update(view)
        if self._kept_view is not None:
            self._view_to_keep = encode_view(found, self._cursor.history, self._cursor.epoch)
        return True

    async def _write_kept(self) -> None:
        view, self._view_to_keep = self._view_to_keep, None
        if view is not None and self._kept_view is not None:
            await asyncio.to_thread(self._kept_view.write, view)

    def _apply_update(self, view: pb.ClusterView) -> ClusterView:
        """Apply an update to the known state of the cluster; publish and return the new state."""
        self._apply_access(view)
        if view.is_snapshot:
            self._blocks, self._routes = {}, {}
        for name in view.removed_routes:
            self._routes.pop(name, None)
        self._routes |= {route.name: _decode_route(route) for route in view.routes}
        for block_id in view.removed:
            self._blocks.pop(block_id, None)
        self._blocks |= {block.block_id: _decode_block(block) for block in view.blocks}
        if view.has_gateways:
            self._gateways = tuple(
                GatewayMember(each.gateway_id, each.endpoint, each.address) for each in view.gateways
            )
            self._membership = view.membership
        if view.has_curve_keys:
            self._workers_keys = tuple(view.curve_keys)
        if view.is_snapshot or view.records or view.removed_records:
            kept = {} if view.is_snapshot else self._records
            removed = set(view.removed_records)
            self._records = {key: value for key, value in kept.items() if key not in removed} | dict(view.records)
        blocks = sorted(self._blocks.values(), key=lambda block: (block.model, int(block.version)))
        routes = tuple(self._routes.values())
        found = ClusterView(
            blocks, self._gateways, self._membership, routes, self._access, self._workers_keys, self._records
        )
        self._listener(found)
        return found

    def _apply_access(self, view: pb.ClusterView) -> None:
        """Apply changes of keys and signers; without changes, the view stays the same object.

        If a manager's snapshot has no keys, the previous keys stay in use, so that no endpoint becomes open.
        """
        if not (view.HasField("access") or view.keys or view.removed_keys):
            return
        before = NO_KEYS if view.is_snapshot else self._access
        secret, needs_key, signers, keys = before.secret, before.needs_key, before.signers, dict(before.keys)
        ahead_s = before.clock_ahead_s
        if view.HasField("access"):
            secret, needs_key = view.access.secret, view.access.is_asking
            signers = {each.kid: each.public for each in view.access.signers}
            ahead_s = measure_clock_ahead(view.access.clock)
        for key_id in view.removed_keys:
            keys.pop(key_id, None)
        keys |= {each.key_id: each.record for each in view.keys}
        self._access = AccessView(secret, needs_key, keys, signers, ahead_s)


def _decode_block(block: pb.BlockView) -> BlockView:
    return BlockView(**{**copy_fields(block, BlockView), "state": BlockState(block.state)})


def _decode_route(route: pb.Route) -> NameRoute:
    sticky = route.sticky if route.sticky in get_args(Sticky) else "none"
    shares = tuple(BlockShare(each.block_id, each.weight) for each in route.shares)
    return NameRoute(**{**copy_fields(route, NameRoute), "shares": shares, "sticky": sticky})


def _check_name(model: str) -> None:
    """Raise UnknownModel for a name that is longer than a model's name can be, without asking the manager."""

    if len(model) > MAX_NAME_CHARS:
        raise UnknownModel(
            f"unknown model '{model[:MAX_NAME_CHARS]}…': a model's name has at most {MAX_NAME_CHARS} characters"
        )
