"""A gateway's connection to a manager in another process."""

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

from penstock.core.blocks import BlockState, BlockView, ClusterPicture, GatewayMember, Listener
from penstock.core.cluster.access_view import NO_KEYS, AccessView
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.errors import NameTaken, UnknownModel
from penstock.core.routes import NameRoute, Share, Sticky
from penstock.pb.v1 import access_pb2
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1.access_pb2_grpc import DirectStub
from penstock.pb.v1.manager_pb2_grpc import ManagerStub
from penstock.wire.heard import Heard, Verdict
from penstock.wire.leader import Leader, said_aloud
from penstock.wire.values import fields_in

log = structlog.get_logger()
BEAT_S = 1.0  # the manager hears from every gateway so often
COUNT_S = 0.2  # and from one that counts for it
UNLOAD_TIMEOUT_S = 60.0
ROUTING_TIMEOUT_S = 10.0
DISCOVER_TIMEOUT_S = 15.0
LOAD_TIMEOUT_S = 86_400.0
LEAVE_S = 0.02
NAME_CHARS = 128
CALLERS_KEY = "penstock-callers-key-bin"  # of whom a call is passed on: it counts in place of what the channel shows
ASKED_BY = "penstock-asked-by-bin"  # whom the gateway has admitted, for who keeps what was changed by whom


class RemoteControl:
    """Implements core.blocks.Control, and watches the cluster for as long as it is open."""

    def __init__(
        self,
        leader: Leader,
        me: GatewayMember,
        listener: Listener,
        counted: Callable[[], Sequence[AnswerCounts]] = list,
        answered: Callable[[bool], Sequence[ModelAnswers]] = lambda is_all: (),
        sessions: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`counted` gives what was counted of the blocks that routes name since it was last asked, `answered` what was
        answered for models since the process began: of all, or of those that it is another for since it was asked;
        `sessions` how many there are."""
        self._leader = leader
        self._me = me
        self._incarnation = secrets.token_hex(8)
        self._listener = listener
        self._heard = Heard()
        self._is_leaving = False
        self._is_lost = False  # something was missed: everything is wanted
        self._counted = counted
        self._answered = answered
        self._sessions = sessions
        self._blocks: dict[str, BlockView] = {}
        self._routes: dict[str, NameRoute] = {}
        self._gateways: tuple[GatewayMember, ...] = ()
        self._membership = 0
        self._access = NO_KEYS
        self._workers_keys: tuple[str, ...] = ()
        self._is_asked = asyncio.Event()  # the manager is to be told something at once
        self.refusal: NameTaken | None = None  # by the manager, at the last call
        self._watching = asyncio.create_task(leader.attend(self._watch), name="watch-manager")

    async def load(self, model: str, asked_by: str) -> None:
        _check(model)
        await self._call("Load", pb.LoadRequest(model=model), LOAD_TIMEOUT_S, asked_by)

    async def unload(self, model: str, asked_by: str) -> None:
        _check(model)
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
        self._is_asked.set()
        await asyncio.sleep(LEAVE_S)  # so that it is heard, where somebody hears
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    async def _call(self, method: str, request: Message, timeout_s: float, asked_by: str) -> None:
        metadata = ((ASKED_BY, asked_by.encode()),)
        await self._leader.call(
            lambda channel, left_s: getattr(ManagerStub(channel), method)(request, timeout=left_s, metadata=metadata),
            timeout_s,
        )

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """While the managers are away, the last view stands."""
        try:
            async for view in ManagerStub(channel).Watch(said_aloud(self._requests()), wait_for_ready=True):
                if not self._take(view):
                    break
        except grpc.aio.AioRpcError as error:
            is_taken = error.code() is grpc.StatusCode.ALREADY_EXISTS
            self.refusal = NameTaken(error.details() or self._me.gateway_id) if is_taken else None
            raise
        except Exception:
            self._is_lost = True  # the listener may have taken a part of it: everything is wanted once more
            raise

    async def _requests(self) -> AsyncIterator[pb.WatchRequest]:
        told = 0.0  # when the answers were
        while True:
            self._is_asked.clear()
            counts = self._counted()
            answers: Sequence[ModelAnswers] = ()
            if time.monotonic() - told >= BEAT_S:
                answers, told = self._answered(not told), time.monotonic()
            request = pb.WatchRequest(
                gateway_id=self._me.gateway_id,
                endpoint=self._me.endpoint,
                address=self._me.address,
                incarnation=self._incarnation,
                history=self._heard.history,
                epoch=self._heard.epoch,
                revision=self._heard.revision,
                is_lost=self._is_lost,
                is_leaving=self._is_leaving,
                counts=[pb.AnswerCounts(**asdict(each)) for each in counts],
                answers=[pb.ModelAnswers(**each._asdict()) for each in answers],
                sessions=pb.SessionCounts(**self._sessions()),
            )
            self._is_lost = False
            yield request
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_asked.wait(), COUNT_S if counts else BEAT_S)

    def _take(self, view: pb.ClusterView) -> bool:
        """False: whoever said it leads the cluster no more."""
        verdict = self._heard.hear(view)
        if verdict is Verdict.MISSED:
            self._is_lost = True
            self._is_asked.set()
        elif verdict is Verdict.DEPOSED:
            log.warning("deposed_manager", epoch=view.epoch, newest=self._heard.epoch)
        if verdict is not Verdict.TAKEN:
            return verdict is Verdict.MISSED
        self._take_access(view)
        if view.is_snapshot:
            self._blocks, self._routes = {}, {}
        for name in view.removed_routes:
            self._routes.pop(name, None)
        self._routes |= {route.name: _decode_route(route) for route in view.routes}
        for block_id in view.removed:
            self._blocks.pop(block_id, None)
        self._blocks |= {block.block_id: _decode(block) for block in view.blocks}
        if view.has_gateways:
            self._gateways = tuple(
                GatewayMember(each.gateway_id, each.endpoint, each.address) for each in view.gateways
            )
            self._membership = view.membership
        if view.has_curve_keys:
            self._workers_keys = tuple(view.curve_keys)
        blocks = sorted(self._blocks.values(), key=lambda block: (block.model, int(block.version)))
        routes = tuple(self._routes.values())
        self._listener(
            ClusterPicture(blocks, self._gateways, self._membership, routes, self._access, self._workers_keys)
        )
        return True

    def _take_access(self, view: pb.ClusterView) -> None:
        """It stays the same object for as long as nothing of it is another. Everything of a manager that knows nothing
        of keys opens no door."""
        if not (view.HasField("access") or view.keys or view.removed_keys):
            return
        before = NO_KEYS if view.is_snapshot else self._access
        secret, is_asking, signers, keys = before.secret, before.is_asking, before.signers, dict(before.keys)
        if view.HasField("access"):
            secret, is_asking = view.access.secret, view.access.is_asking
            signers = {each.kid: each.public for each in view.access.signers}
        for key_id in view.removed_keys:
            keys.pop(key_id, None)
        keys |= {each.key_id: each.record for each in view.keys}
        self._access = AccessView(secret, is_asking, keys, signers)


def _decode(block: pb.BlockView) -> BlockView:
    return BlockView(**{**fields_in(block, BlockView), "state": BlockState(block.state)})


def _decode_route(route: pb.Route) -> NameRoute:
    sticky = route.sticky if route.sticky in get_args(Sticky) else "none"
    shares = tuple(Share(each.block_id, each.weight) for each in route.shares)
    return NameRoute(**{**fields_in(route, NameRoute), "shares": shares, "sticky": sticky})


def _check(model: str) -> None:
    """No model has a name that long, and the manager need not hear of it."""
    if len(model) > NAME_CHARS:
        raise UnknownModel(f"unknown model '{model[:NAME_CHARS]}…': no name has more than {NAME_CHARS} characters")
