"""The manager's gRPC service: workers attach, gateways watch."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import grpc

from penstock.access.guard import needs_scope
from penstock.core.blocks import BlockState, BlockView
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.errors import InvalidRequest
from penstock.core.principals import Scope
from penstock.core.routes import NameRoute
from penstock.manager.access.door import Context, check_change
from penstock.manager.deployed_block import WorkerState
from penstock.manager.desired import GatewayRecord
from penstock.manager.lives import WorkerArrived, WorkerHeard, WorkerStreamEnded
from penstock.manager.manager import Manager, now
from penstock.manager.placing.sites import SharedCapacity
from penstock.manager.reign import BlockCount, Facts, Load, Report
from penstock.manager.telling.boards import (
    BLOCK,
    KEY,
    ROUTE,
    AssignedBlock,
    Endpoints,
    Given,
    OpenDoor,
    Shown,
    ToldAccess,
    ToldGateways,
    ToldKey,
    ToldTokens,
    WorkersKeys,
)
from penstock.manager.telling.ledger import Ledger, LedgerDelta
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1 import manager_pb2_grpc
from penstock.wire.forms import decode_devices, decode_standing
from penstock.wire.values import as_values

T = TypeVar("T")
M = TypeVar("M", pb.WorkerReport, pb.WatchRequest)
STATES = {str(state): state for state in BlockState}


class ManagerService(manager_pb2_grpc.ManagerServicer):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._streams = count(1)

    @needs_scope(Scope.JOIN)
    async def Attach(self, reports: AsyncIterator[pb.WorkerReport], context: Context) -> AsyncIterator[pb.Assignment]:
        manager, first, stream = self._manager, await anext(aiter(reports)), next(self._streams)
        if not first.worker_id:
            raise InvalidRequest("a worker says first who it is: worker_id is empty")
        history, epoch = await self._lead(first)
        reign, worker = manager.reign, first.worker_id
        arrived = WorkerArrived(worker, first.incarnation or str(first.pid), stream)
        heard = WorkerHeard(worker, stream)
        reign.arrive(arrived, _facts(first), _report(first), now())
        if first.HasField("load"):  # with all its counts
            reign.hear(heard, Report((), is_snapshot=False), _load(first.load), now())
        hearing = _Hearing.of(first, history, epoch)
        listening = asyncio.create_task(self._listen(reports, hearing, partial(self._take_report, heard)))
        try:
            await manager.notify(is_sure=True)
            if stream not in reign.refused:
                ledger = reign.boards.assignment(worker)

                def is_over() -> bool:
                    return hearing.is_over or not self._leads(history, epoch) or stream in reign.refused

                async for delta in self._deltas(ledger, hearing, is_over):
                    yield _assignment(delta, history, epoch)
            if stream in reign.refused:
                refusal = reign.refused[stream]
                is_removed = reign.record(worker).removed == arrived.incarnation
                code = grpc.StatusCode.FAILED_PRECONDITION if is_removed else grpc.StatusCode.ABORTED
                await context.abort(grpc.StatusCode.ALREADY_EXISTS if refusal.is_name_taken else code, refusal.reason)
        finally:
            listening.cancel()
            reign.end(WorkerStreamEnded(worker, stream, hearing.is_leaving), now())
            await manager.notify()

    @needs_scope(Scope.JOIN)
    async def Watch(self, requests: AsyncIterator[pb.WatchRequest], context: Context) -> AsyncIterator[pb.ClusterView]:
        manager, first, stream = self._manager, await anext(aiter(requests)), next(self._streams)
        if not first.gateway_id or not first.endpoint:
            raise InvalidRequest("a gateway says first who it is, and where")
        history, epoch = await self._lead(first)
        gateway = GatewayRecord(gateway_id=first.gateway_id, endpoint=first.endpoint, address=first.address)
        hearing = _Hearing.of(first, history, epoch)
        listening = asyncio.create_task(self._listen(requests, hearing, self._take_counts))
        try:
            await manager.membership.joined(stream, gateway, first.incarnation)
            self._take_counts(first)
            reign = manager.reign
            if first.epoch:
                # Until the workers have come, what it last heard of another manager is better than what is known here.
                await manager.wait_until(lambda: hearing.is_over or manager.epoch != epoch or not reign.is_adopting)
            view = reign.boards.view
            async for delta in self._deltas(view, hearing, lambda: hearing.is_over or not self._leads(history, epoch)):
                yield _cluster_view(delta, history, epoch)
        finally:
            listening.cancel()
            if manager.epoch == epoch:
                await manager.membership.left(stream, gateway.gateway_id, hearing.is_leaving)

    @needs_scope(Scope.JOIN)
    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.LoadResponse:
        self._check_change(request.model)
        await self._manager.load(request.model)
        return pb.LoadResponse()

    @needs_scope(Scope.JOIN)
    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:
        self._check_change(request.model)
        await self._manager.unload(request.model)
        return pb.UnloadResponse()

    @needs_scope(Scope.JOIN)
    async def SetRouting(self, request: pb.SetRoutingRequest, context: Context) -> pb.SetRoutingResponse:
        self._check_change(request.model)
        await self._manager.set_routing(request.model, request.routing)
        return pb.SetRoutingResponse()

    def _check_change(self, model: str) -> None:
        check_change(model, (block.block_id for block in self._manager.desired.of_model(model)))

    async def _lead(self, first: pb.WorkerReport | pb.WatchRequest) -> tuple[str, int]:
        """The history and the epoch that this manager leads, also if the peer has heard of a later one."""
        if not (epoch := self._manager.epoch):
            raise self._manager.election.not_leading()
        await self._manager.prove_reign(first.history, first.epoch)
        return self._manager.desired.history, epoch

    def _leads(self, history: str, epoch: int) -> bool:
        return (self._manager.desired.history, self._manager.epoch) == (history, epoch)

    async def _deltas(
        self, ledger: Ledger[T], hearing: "_Hearing", is_over: Callable[[], bool]
    ) -> AsyncIterator[LedgerDelta[T]]:
        """What is another, as fast as it is taken: whoever is slow gets several changes as one."""
        has_told = False
        while not is_over():
            if not has_told or hearing.seen != ledger.revision:
                delta = ledger.since(hearing.seen)
                hearing.seen, has_told = delta.revision, True
                yield delta
            await self._manager.wait_until(lambda: is_over() or hearing.seen != ledger.revision)

    async def _listen(self, said: AsyncIterator[M], hearing: "_Hearing", take: Callable[[M], None]) -> None:
        try:
            async for each in said:
                hearing.hear(each.is_lost, each.is_leaving)
                take(each)
                await self._manager.notify(is_sure=each.is_lost)
        finally:
            hearing.is_over = True
            await self._manager.notify(is_sure=True)

    def _take_report(self, heard: WorkerHeard, report: pb.WorkerReport) -> None:
        reign = self._manager.reign
        if report.HasField("facts"):
            reign.learn(heard, _facts(report))
        reign.hear(heard, _report(report), _load(report.load) if report.HasField("load") else None, now())

    def _take_counts(self, request: pb.WatchRequest) -> None:
        if request.HasField("sessions"):
            told = {field.name: getattr(request.sessions, field.name) for field in request.sessions.DESCRIPTOR.fields}
            for of_sessions in self._manager.on_sessions:
                of_sessions(request.gateway_id, told)
        if request.counts:
            counts = [_counts(each) for each in request.counts]
            for of_blocks in self._manager.on_counts:
                of_blocks(request.gateway_id, counts)
        if request.answers:
            answers = [_answers(each) for each in request.answers]
            for of_models in self._manager.on_answers:
                of_models(request.gateway_id, request.incarnation, answers)


@dataclass(slots=True)
class _Hearing:
    """How far a peer has heard, and what it last said of itself."""

    seen: int

    @classmethod
    def of(cls, first: pb.WorkerReport | pb.WatchRequest, history: str, epoch: int) -> "_Hearing":
        """What was heard of others, or in another history, is not of these revisions."""
        return cls(first.revision if (first.history, first.epoch) == (history, epoch) else 0)

    is_leaving: bool = False
    is_over: bool = False  # its side of the stream has ended

    def hear(self, is_lost: bool, is_leaving: bool) -> None:
        self.seen = 0 if is_lost else self.seen
        self.is_leaving = is_leaving


# --- to and from the wire


def _facts(report: pb.WorkerReport) -> Facts:
    told = as_values(report.facts)
    shared = tuple(SharedCapacity(**each) for each in told.pop("shared"))
    return Facts(**told, shared=shared, pid=report.pid)


def _report(report: pb.WorkerReport) -> Report:
    # What a later version of Penstock calls otherwise is not ready yet, as far as this one knows.
    states = [
        (b.block_id, WorkerState(STATES.get(b.state, BlockState.LOADING), b.reason, b.revision, b.is_serving, b.is_new))
        for b in report.blocks
    ]
    return Report(states, list(report.removed), report.is_snapshot)


def _load(load: pb.WorkerLoad) -> Load:
    return Load(
        load.cpu,
        load.memory_bytes,
        load.gpu if load.HasField("gpu") else None,
        load.gpu_memory_bytes if load.HasField("gpu_memory_bytes") else None,
        load.jobs,
        load.waiting,
        load.busy,
        load.instances,
        {each.block_id: _count(each) for each in load.counts},
        decode_devices(load.devices),
    )


def _count(told: pb.BlockCounts) -> BlockCount:
    generation = decode_standing(told.generation) if told.HasField("generation") else None
    return BlockCount(told.requests, told.errors, told.latency_s, generation)


def _counts(counts: pb.AnswerCounts) -> AnswerCounts:
    return AnswerCounts(
        counts.block_id,
        counts.answers,
        dict(counts.errors),
        dict(counts.latencies),
        dict(counts.waiting),
        counts.is_control,
    )


def _answers(answers: pb.ModelAnswers) -> ModelAnswers:
    codes, buckets = dict(answers.codes), list(answers.buckets)
    return ModelAnswers(answers.model, answers.version, codes, buckets, answers.seconds)


def _assignment(delta: LedgerDelta[Given], history: str, epoch: int) -> pb.Assignment:
    message = pb.Assignment(
        history=history,
        epoch=epoch,
        revision=delta.revision,
        is_snapshot=delta.is_snapshot,
        since=delta.since,
        removed=_ids(delta),
    )
    for given in delta.changed.values():
        match given:
            case AssignedBlock():
                message.blocks.add(**given._asdict())
            case Endpoints(endpoints):
                message.has_gateways = True
                message.gateways.extend(endpoints)
            case ToldTokens(is_asking, signers, revoked):
                told = pb.TokenFacts(is_asking=is_asking, signers=_signers(signers), revoked=revoked)
                message.tokens.CopyFrom(told)
            case OpenDoor():
                message.opens_door = True
    return message


def _cluster_view(delta: LedgerDelta[Shown], history: str, epoch: int) -> pb.ClusterView:
    message = pb.ClusterView(
        history=history,
        epoch=epoch,
        revision=delta.revision,
        is_snapshot=delta.is_snapshot,
        since=delta.since,
        removed=_ids(delta),
        removed_routes=_ids(delta, ROUTE),
        removed_keys=_ids(delta, KEY),
    )
    for shown in delta.changed.values():
        match shown:
            case BlockView():
                message.blocks.add(**asdict(shown))
            case NameRoute():
                message.routes.append(_route(shown))
            case ToldGateways(revision, gateways):
                message.has_gateways, message.membership = True, revision
                message.gateways.extend(pb.GatewayMember(**each._asdict()) for each in gateways)
            case WorkersKeys(keys):
                message.has_curve_keys = True
                message.curve_keys.extend(keys)
            case ToldAccess(secret, is_asking, signers):
                told = pb.AccessFacts(secret=secret, is_asking=is_asking, signers=_signers(signers))
                message.access.CopyFrom(told)
            case ToldKey():
                message.keys.add(**asdict(shown))
    return message


def _signers(signers: Iterable[tuple[str, bytes]]) -> list[pb.TokenSigner]:
    return [pb.TokenSigner(kid=kid, public=public) for kid, public in signers]


def _route(route: NameRoute) -> pb.Route:
    fields = asdict(route) | {"shares": [pb.WeightedBlock(**share._asdict()) for share in route.shares]}
    return pb.Route(**fields)


def _ids(delta: LedgerDelta[T], prefix: str = BLOCK) -> list[str]:
    return [key.removeprefix(prefix) for key in delta.removed if key.startswith(prefix)]
