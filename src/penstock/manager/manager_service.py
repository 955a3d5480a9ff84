"""The manager's gRPC service: workers attach to the manager, and gateways watch the cluster."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import grpc

from penstock.core.blocks import BlockState, BlockView
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.cluster.routes import NameRoute
from penstock.core.errors import InvalidRequest
from penstock.core.principals import Scope
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.guarded_server import Context, check_change
from penstock.manager.control_plane import now
from penstock.manager.deployed_block import WorkerState
from penstock.manager.desired_state import GatewayRecord
from penstock.manager.feature import TrafficReport
from penstock.manager.manager import Manager
from penstock.manager.placing.sites import SharedCapacity
from penstock.manager.publishing.publisher import (
    BLOCK,
    KEY,
    RECORD,
    ROUTE,
    AccessItem,
    AssignedBlock,
    GatewayEndpoints,
    GatewayItem,
    GatewayUpdate,
    KeyItem,
    OpenEndpoint,
    RecordItem,
    TokenItem,
    WorkersKeys,
    WorkerUpdate,
)
from penstock.manager.publishing.versioned_map import MapDelta, VersionedMap
from penstock.manager.term import BlockCount, BlocksReport, WorkerFacts, WorkerLoad
from penstock.manager.worker_liveness import WorkerArrived, WorkerReported, WorkerStreamEnded
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1 import manager_pb2_grpc
from penstock.wire.encodings import decode_devices, decode_generation_state
from penstock.wire.kept_view import encode_route
from penstock.wire.plain_values import to_plain_values

T = TypeVar("T")
M = TypeVar("M", pb.WorkerReport, pb.WatchRequest)
STATES = {str(state): state for state in BlockState}


class ManagerService(manager_pb2_grpc.ManagerServicer):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._control = manager.control
        self._streams = count(1)

    @needs_scope(Scope.JOIN)
    async def Attach(self, reports: AsyncIterator[pb.WorkerReport], context: Context) -> AsyncIterator[pb.Assignment]:
        control, first, stream = self._control, await anext(aiter(reports)), next(self._streams)
        if not first.worker_id:
            raise InvalidRequest("worker_id is empty: the first message of a worker must contain its id")
        history, epoch = await self._check_leads(first)
        term, worker = control.term, first.worker_id
        arrived = WorkerArrived(worker, first.incarnation or str(first.pid), stream)
        reported = WorkerReported(worker, stream)
        term.worker_joined(arrived, _decode_facts(first), _decode_report(first), now())
        if first.HasField("load"):  # the first load contains all counts
            term.worker_reported(reported, BlocksReport((), is_snapshot=False), _decode_load(first.load), now())
        peer = _PeerState.from_first_message(first, history, epoch)
        receiving = asyncio.create_task(self._receive(reports, peer, partial(self._apply_report, reported)))
        try:
            await control.notify(is_changed=True)
            if stream not in term.refused:
                updates = term.publisher.get_assignment(worker)

                def is_over() -> bool:
                    return peer.is_over or not self._is_term_current(history, epoch) or stream in term.refused

                async for delta in self._yield_deltas(updates, peer, is_over):
                    yield _encode_assignment(delta, history, epoch)
            if stream in term.refused:
                refusal = term.refused[stream]
                is_removed = term.get_worker_record(worker).removed == arrived.incarnation
                code = grpc.StatusCode.FAILED_PRECONDITION if is_removed else grpc.StatusCode.ABORTED
                await context.abort(grpc.StatusCode.ALREADY_EXISTS if refusal.is_name_taken else code, refusal.reason)
        finally:
            receiving.cancel()
            term.stream_ended(WorkerStreamEnded(worker, stream, peer.is_leaving), now())
            await control.notify()

    @needs_scope(Scope.JOIN)
    async def Watch(self, requests: AsyncIterator[pb.WatchRequest], context: Context) -> AsyncIterator[pb.ClusterView]:
        control, first, stream = self._control, await anext(aiter(requests)), next(self._streams)
        if not first.gateway_id or not first.endpoint:
            raise InvalidRequest("gateway_id or endpoint is empty: the first message of a gateway must contain both")
        history, epoch = await self._check_leads(first)
        gateway = GatewayRecord(gateway_id=first.gateway_id, endpoint=first.endpoint, address=first.address)
        peer = _PeerState.from_first_message(first, history, epoch)
        receiving = asyncio.create_task(self._receive(requests, peer, self._report_traffic))
        try:
            await control.membership.add_gateway(stream, gateway, first.incarnation)
            self._report_traffic(first)
            term = control.term
            if first.epoch:
                # Until the workers have attached, the gateway's view from the previous leader is more complete.
                await control.wait_until(lambda: peer.is_over or control.epoch != epoch or not term.is_adopting)
            view = term.publisher.view
            async for delta in self._yield_deltas(
                view, peer, lambda: peer.is_over or not self._is_term_current(history, epoch)
            ):
                yield _encode_view(delta, history, epoch)
        finally:
            receiving.cancel()
            if control.epoch == epoch:
                await control.membership.stream_ended(stream, gateway.gateway_id, peer.is_leaving)

    @needs_scope(Scope.JOIN)
    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.LoadResponse:
        self._check_change(request.model)
        await self._manager.load(request.model)
        return pb.LoadResponse()

    @needs_scope(Scope.JOIN)
    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:
        self._check_change(request.model)
        await self._manager.deployer.unload(request.model)
        return pb.UnloadResponse()

    @needs_scope(Scope.JOIN)
    async def SetRouting(self, request: pb.SetRoutingRequest, context: Context) -> pb.SetRoutingResponse:
        self._check_change(request.model)
        await self._manager.deployer.set_routing(request.model, request.routing)
        return pb.SetRoutingResponse()

    def _check_change(self, model: str) -> None:
        check_change(model, (block.block_id for block in self._control.desired.list_model_blocks(model)))

    async def _check_leads(self, first: pb.WorkerReport | pb.WatchRequest) -> tuple[str, int]:
        """Return the current history id and epoch; raise NotLeader if this manager does not lead."""
        if not (epoch := self._control.epoch):
            raise self._control.election.make_not_leading_error()
        await self._control.check_peer_epoch(first.history, first.epoch)
        return self._control.desired.history, epoch

    def _is_term_current(self, history: str, epoch: int) -> bool:
        return (self._control.desired.history, self._control.epoch) == (history, epoch)

    async def _yield_deltas(
        self, updates: VersionedMap[T], peer: "_PeerState", is_over: Callable[[], bool]
    ) -> AsyncIterator[MapDelta[T]]:
        """Yield changes as fast as the peer reads; a slow peer gets several changes as one delta."""
        has_sent = False
        while not is_over():
            if not has_sent or peer.seen_revision != updates.revision:
                delta = updates.read_since(peer.seen_revision)
                peer.seen_revision, has_sent = delta.revision, True
                yield delta
            await self._control.wait_until(lambda: is_over() or peer.seen_revision != updates.revision)

    async def _receive(self, messages: AsyncIterator[M], peer: "_PeerState", take: Callable[[M], None]) -> None:
        try:
            async for message in messages:
                peer.update(message.is_lost, message.is_leaving)
                take(message)
                await self._control.notify(is_changed=message.is_lost)
        finally:
            peer.is_over = True
            await self._control.notify(is_changed=True)

    def _apply_report(self, reported: WorkerReported, report: pb.WorkerReport) -> None:
        term = self._control.term
        if report.HasField("facts"):
            term.facts_reported(reported, _decode_facts(report))
        term.worker_reported(
            reported, _decode_report(report), _decode_load(report.load) if report.HasField("load") else None, now()
        )

    def _report_traffic(self, request: pb.WatchRequest) -> None:
        sessions = request.sessions if request.HasField("sessions") else None
        report = TrafficReport(
            request.gateway_id,
            request.incarnation,
            [_decode_counts(each) for each in request.counts],
            [_decode_answers(each) for each in request.answers],
            None
            if sessions is None
            else {field.name: getattr(sessions, field.name) for field in sessions.DESCRIPTOR.fields},
        )
        self._manager.report_traffic(report)


@dataclass(slots=True)
class _PeerState:
    """The last revision that a peer has seen, and the state of the peer's side of the stream."""

    seen_revision: int

    @classmethod
    def from_first_message(cls, first: pb.WorkerReport | pb.WatchRequest, history: str, epoch: int) -> "_PeerState":
        """Return a state that sends changes after the peer's revision or, if that is from another term, a snapshot."""
        return cls(first.revision if (first.history, first.epoch) == (history, epoch) else 0)

    is_leaving: bool = False
    is_over: bool = False  # the peer has ended its side of the stream

    def update(self, is_lost: bool, is_leaving: bool) -> None:
        self.seen_revision = 0 if is_lost else self.seen_revision
        self.is_leaving = is_leaving


# --- protobuf messages to and from the manager's types


def _decode_facts(report: pb.WorkerReport) -> WorkerFacts:
    facts = to_plain_values(report.facts)
    shared = tuple(SharedCapacity(**each) for each in facts.pop("shared"))
    return WorkerFacts(**facts, shared=shared, pid=report.pid)


def _decode_report(report: pb.WorkerReport) -> BlocksReport:
    # A state that only a later version of Penstock knows is treated as loading.
    states = [
        (b.block_id, WorkerState(STATES.get(b.state, BlockState.LOADING), b.reason, b.revision, b.is_serving, b.is_new))
        for b in report.blocks
    ]
    return BlocksReport(states, list(report.removed), report.is_snapshot)


def _decode_load(load: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        load.cpu,
        load.memory_bytes,
        load.gpu if load.HasField("gpu") else None,
        load.gpu_memory_bytes if load.HasField("gpu_memory_bytes") else None,
        load.jobs,
        load.waiting,
        load.busy,
        load.instances,
        {each.block_id: _decode_count(each) for each in load.counts},
        decode_devices(load.devices),
    )


def _decode_count(counts: pb.BlockCounts) -> BlockCount:
    generation = decode_generation_state(counts.generation) if counts.HasField("generation") else None
    return BlockCount(counts.requests, counts.errors, counts.latency_s, generation)


def _decode_counts(counts: pb.AnswerCounts) -> AnswerCounts:
    return AnswerCounts(
        counts.block_id,
        counts.answers,
        dict(counts.errors),
        dict(counts.latencies),
        dict(counts.waiting),
        counts.is_control,
    )


def _decode_answers(answers: pb.ModelAnswers) -> ModelAnswers:
    codes, buckets = dict(answers.codes), list(answers.buckets)
    return ModelAnswers(answers.model, answers.version, codes, buckets, answers.seconds)


def _encode_assignment(delta: MapDelta[WorkerUpdate], history: str, epoch: int) -> pb.Assignment:
    message = pb.Assignment(
        history=history,
        epoch=epoch,
        revision=delta.revision,
        is_snapshot=delta.is_snapshot,
        since=delta.since_revision,
        removed=_list_removed_ids(delta),
    )
    for update in delta.changed.values():
        match update:
            case AssignedBlock():
                message.blocks.add(**update._asdict())
            case GatewayEndpoints(endpoints):
                message.has_gateways = True
                message.gateways.extend(endpoints)
            case TokenItem(needs_key, signers, revoked, expires_at):
                tokens = pb.TokenFacts(
                    is_asking=needs_key, signers=_encode_signers(signers), revoked=revoked, clock=time.time()
                )
                tokens.expires_at.update(expires_at)
                message.tokens.CopyFrom(tokens)
            case OpenEndpoint():
                message.opens_door = True
    return message


def _encode_view(delta: MapDelta[GatewayUpdate], history: str, epoch: int) -> pb.ClusterView:
    message = pb.ClusterView(
        history=history,
        epoch=epoch,
        revision=delta.revision,
        is_snapshot=delta.is_snapshot,
        since=delta.since_revision,
        removed=_list_removed_ids(delta),
        removed_routes=_list_removed_ids(delta, ROUTE),
        removed_keys=_list_removed_ids(delta, KEY),
        removed_records=_list_removed_ids(delta, RECORD),
    )
    for update in delta.changed.values():
        match update:
            case BlockView():
                message.blocks.add(**asdict(update))
            case NameRoute():
                message.routes.append(encode_route(update))
            case GatewayItem(revision, gateways):
                message.has_gateways, message.membership = True, revision
                message.gateways.extend(pb.GatewayMember(**each._asdict()) for each in gateways)
            case WorkersKeys(keys):
                message.has_curve_keys = True
                message.curve_keys.extend(keys)
            case AccessItem(secret, needs_key, signers):
                access = pb.AccessFacts(
                    secret=secret, is_asking=needs_key, signers=_encode_signers(signers), clock=time.time()
                )
                message.access.CopyFrom(access)
            case KeyItem():
                message.keys.add(**asdict(update))
            case RecordItem(key, value):
                message.records[key] = value
    return message


def _encode_signers(signers: Iterable[tuple[str, bytes]]) -> list[pb.TokenSigner]:
    return [pb.TokenSigner(kid=kid, public=public) for kid, public in signers]


def _list_removed_ids(delta: MapDelta[T], prefix: str = BLOCK) -> list[str]:
    return [key.removeprefix(prefix) for key in delta.removed if key.startswith(prefix)]
