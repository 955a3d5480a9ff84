"""What operators ask of a cluster, over gRPC: any manager answers what only reads, the leader what writes."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from penstock.access.guard import needs_scope
from penstock.core.blocks import BlockRole, WorkerRecord
from penstock.core.errors import Forbidden, InvalidRequest, ModelNotReady, NotFound, UnknownModel
from penstock.core.manifest import SOURCE
from penstock.core.principals import CHANGING, Scope
from penstock.manager.access.door import Context, check_change, may_ask, watching
from penstock.manager.admin.board import KINDS, ClusterBoard
from penstock.manager.admin.changes import BlockChanges, WorkerChanges, wishes
from penstock.manager.admin.statuses import Statuses, event_status
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.desired import BLOCKS, WORKERS, encode
from penstock.manager.manager import Manager, now
from penstock.manager.reign import Notice
from penstock.manager.telling.etags import expecting
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc, manager_pb2
from penstock.storage.metadata.base import Write
from penstock.wire.channels import Channels
from penstock.wire.credentials.files import TlsFiles
from penstock.wire.failures import encode_failure

log = structlog.get_logger()
R = TypeVar("R")
MAX_LISTED = 1000  # events in one answer
ASK_S = 2.0  # what the leader gets to answer another manager
ASKED = ("penstock-asked", "manager")  # by another manager: who does not lead after all answers what it knows


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, manager: Manager, tls: TlsFiles) -> None:
        """`tls`: what it goes by towards the manager that leads."""
        self._manager = manager
        self._tls = tls
        self._statuses = Statuses(manager)
        self._board = ClusterBoard(manager)
        self._sessions: dict[str, Mapping[str, int]] = {}  # by gateway, as it was last told
        manager.on_sessions.append(self._sessions.__setitem__)
        self._changing = asyncio.Lock()  # until it is folded: nobody changes what another is about to change

    # --- what only reads

    @needs_scope(Scope.METRICS, Scope.JOIN)
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        manager, election = self._manager, self._manager.election
        desired, leader = manager.desired, election.leader
        told = await self._ask_leader(pb.StatusResponse, request, context)
        if told is not None and not told.is_leader:
            leader = None  # it was, and its reign is over
        leader_id = leader.manager_id if leader is not None else ""
        status = pb.StatusResponse(
            manager_id=election.manager_id,
            is_leader=bool(manager.epoch),
            leader=leader.address if leader is not None else "",
            epoch=election.leader_epoch,
            revision=desired.revision,
            managers=[
                pb.ManagerStatus(manager_id=each.manager_id, address=each.address, is_leader=name == leader_id)
                for name, each in sorted(election.managers.items())
            ],
            gateways=[manager_pb2.GatewayMember(**each._asdict()) for each in desired.gateways.members()],
            membership=desired.membership,
        )
        if told is not None:
            status.workers.update(told.workers)
            status.blocks.update(told.blocks)
        else:
            status.workers.update(Counter(str(life.state) for life in manager.reign.lives.items().values()))
            status.blocks.update(Counter(self._statuses.state(block) for block in manager.reign.registry.shown()))
        return status

    @needs_scope(Scope.METRICS)
    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        if told := await self._ask_leader(pb.ListWorkersResponse, request, context):
            return told
        if not request.worker_id:
            return pb.ListWorkersResponse(workers=self._statuses.workers())
        self._known_worker(request.worker_id)
        return pb.ListWorkersResponse(workers=[self._statuses.worker(request.worker_id)])

    @needs_scope(Scope.METRICS)
    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> pb.ListBlocksResponse:
        self._check_seen(request.block_id)
        told = await self._ask_leader(pb.ListBlocksResponse, request, context)
        if told is not None and told.HasField("failure"):
            return told
        if told is None and request.block_id:
            return pb.ListBlocksResponse(blocks=[self._statuses.block(self._find(request.block_id))])
        blocks = self._statuses.blocks(request.model) if told is None else told.blocks
        return pb.ListBlocksResponse(blocks=[each for each in blocks if may_ask(each.spec.model, each.block_id)])

    @needs_scope(Scope.METRICS)
    async def ExplainBlock(self, request: pb.ExplainBlockRequest, context: Context) -> pb.ExplainBlockResponse:
        self._check_seen(request.block_id)
        if told := await self._ask_leader(pb.ExplainBlockResponse, request, context):
            return told
        self._manager.check_leads()
        block = self._find(request.block_id)
        return pb.ExplainBlockResponse(sentences=self._manager.reign.explain(block.block_id))

    @needs_scope(Scope.METRICS)
    async def Events(self, request: pb.EventsRequest, context: Context) -> pb.EventsResponse:
        limit = min(request.limit or 100, MAX_LISTED)
        found = self._manager.events.read(request.after, limit, request.kind, request.subject, request.before)
        return pb.EventsResponse(events=[event_status(number, event) for number, event in found])

    @needs_scope(Scope.METRICS)
    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        if told := await self._ask_leader(pb.ListSessionsResponse, request, context):
            return told
        gateways = []
        for each in self._manager.desired.gateways.gateways:
            counts = self._sessions.get(each.gateway_id)
            counted = manager_pb2.SessionCounts(**counts) if counts is not None else None
            gateways.append(pb.GatewaySessions(gateway_id=each.gateway_id, counts=counted))
        return pb.ListSessionsResponse(gateways=gateways)

    @needs_scope(Scope.METRICS)
    async def WatchCluster(self, request: pb.WatchClusterRequest, context: Context) -> AsyncIterator[pb.ClusterChange]:
        self._manager.check_leads()
        async for change in self._board.changes(_kinds(request.kinds)):
            yield change
        raise self._manager.election.not_leading()

    # --- what writes

    @needs_scope(Scope.ADMIN)
    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        changes = WorkerChanges(is_draining=request.is_draining)
        async with self._changing:
            await self._change_worker(request.worker_id, changes, request.expected)
        return pb.DrainWorkerResponse()

    @needs_scope(Scope.ADMIN)
    async def RemoveWorker(self, request: pb.RemoveWorkerRequest, context: Context) -> pb.RemoveWorkerResponse:
        self._manager.check_leads()
        worker_id = request.worker_id
        self._known_worker(worker_id)
        life = self._manager.reign.lives.get(worker_id)
        record = WorkerRecord(removed=life.incarnation) if life is not None else None
        write = Write(WORKERS + worker_id, encode(record) if record is not None else None)
        told = Notice("worker_removed", worker_id, "an operator removed it")
        with expecting(request.expected, WORKERS + worker_id, self._manager.desired.revisions) as compares:
            await self._manager.events.commit([write], [told], compares)
        self._manager.reign.remove(worker_id, now())
        await self._manager.notify(is_sure=True)
        return pb.RemoveWorkerResponse()

    @needs_scope(Scope.ADMIN)
    async def ChangeWorker(self, request: pb.ChangeWorkerRequest, context: Context) -> pb.WorkerResponse:
        async with self._changing:
            await self._change_worker(request.worker_id, WorkerChanges.read(request.changes), request.expected)
        return pb.WorkerResponse(worker=self._statuses.worker(request.worker_id))

    @needs_scope(Scope.ADMIN)
    async def DeployBlock(self, request: pb.DeployBlockRequest, context: Context) -> pb.DeployBlockResponse:
        self._manager.check_leads()
        model = request.spec.model
        check_change(model, (block.block_id for block in self._manager.desired.of_model(model)))
        choice = await self._manager.choose(model, request.spec.version, request.spec.source)
        choice = choice._replace(spec=wishes(request.spec), is_beside=request.is_beside)
        made = pb.DeployBlockResponse(block_ids=await self._manager.deploy(choice))
        if request.wait_s:
            try:
                await self._manager.wait_loaded(choice.model, request.wait_s)
            except ModelNotReady as error:  # it stays wanted, and is told
                log.warning("not_loaded", blocks=list(made.block_ids), error=error.message)
                made.failure.CopyFrom(encode_failure(error))
        return made

    @needs_scope(Scope.ADMIN)
    async def ScaleBlock(self, request: pb.ScaleBlockRequest, context: Context) -> pb.ScaleBlockResponse:
        self._check_seen(request.block_id)
        told = Notice("block_scaled", request.block_id, f"it has {request.replicas} replicas")
        await self._manager.change_block(request.block_id, told, replicas=request.replicas)
        return pb.ScaleBlockResponse()

    @needs_scope(Scope.ADMIN)
    async def RemoveBlock(self, request: pb.RemoveBlockRequest, context: Context) -> pb.RemoveBlockResponse:
        self._manager.check_leads()
        block_id = request.block_id
        self._check_seen(block_id)
        block = self._find(block_id)
        others = [each for each in self._manager.desired.of_model(block.model) if each.block_id != block_id]
        is_last = not any(each.record.role is BlockRole.CHOSEN for each in others)
        told = Notice("block_removed", block_id, f"model '{block.model}' version {block.version}")
        # The last of a folder is unloaded rather than forgotten: the folder would bring it back.
        records = (block.record, *(each.record for each in others))
        is_kept = is_last and not all(each.source.startswith(SOURCE) for each in records)
        with expecting(request.expected, BLOCKS + block_id, self._manager.desired.revisions) as compares:
            if is_kept and block.record.role is BlockRole.CHOSEN:
                await self._manager.unload(block.model, told, compares=compares)
            elif not is_kept or block.record.role is not BlockRole.WITHDRAWN:
                spares = [each.block_id for each in others if is_last and each.record.role is BlockRole.SPARE]
                writes = [Write(BLOCKS + each, None) for each in (block_id, *spares)]
                await self._manager.events.commit(writes, [told], compares)
        return pb.RemoveBlockResponse()

    @needs_scope(Scope.ADMIN)
    async def ChangeBlock(self, request: pb.ChangeBlockRequest, context: Context) -> pb.BlockResponse:
        self._manager.check_leads()
        self._check_seen(request.block_id)
        block = self._find(request.block_id)
        async with self._changing:
            fields = BlockChanges.read(request.changes).of(block.record)
            told = Notice("block_changed", block.block_id, f"another is now: {', '.join(sorted(fields)) or 'nothing'}")
            if "replicas" in fields:
                told = Notice("block_scaled", block.block_id, f"it has {fields['replicas']} replicas")
            await self._manager.change_block(block.block_id, told, expected=request.expected, **fields)
        return pb.BlockResponse(block=self._statuses.block(self._find(block.block_id)))

    async def _change_worker(self, worker_id: str, changes: WorkerChanges, expected: str) -> None:
        self._manager.check_leads()
        record = changes.of(self._known_worker(worker_id))
        said = "it gets no more blocks" if record.is_draining else "it may get blocks again"
        told = [Notice("worker_drained" if record.is_draining else "worker_open", worker_id, said)]
        if changes.is_draining is None:
            labels = ", ".join(f"{key}={value}" for key, value in sorted(record.labels.items()))
            told = [Notice("worker_labelled", worker_id, f"what was given to it: {labels or 'no labels'}")]
        write = Write(WORKERS + worker_id, None if record == WorkerRecord() else encode(record))
        with expecting(expected, WORKERS + worker_id, self._manager.desired.revisions) as compares:
            await self._manager.events.commit([write], told, compares)

    # --- what they are made of

    async def _ask_leader(self, kind: type[R], request: Any, context: Context) -> R | None:
        """What the leader answers, who alone hears the workers; None: this one leads, or nobody answers."""
        leader = self._manager.election.leader
        is_asked = context is not None and ASKED in (context.invocation_metadata() or ())
        if self._manager.epoch or leader is None or not leader.address or is_asked:
            return None
        try:
            async with Channels(self._manager.managers_key(), self._tls).open(leader.address) as channel:
                call = getattr(cluster_pb2_grpc.ClusterStub(channel), kind.__name__.removesuffix("Response"))
                answer = await call(request, timeout=ASK_S, metadata=(ASKED,))
                return answer if isinstance(answer, kind) else None
        except grpc.aio.AioRpcError as error:
            log.info("leader_away", leader=leader.address, error=error.details())
            return None

    def _find(self, block_id: str) -> DeployedBlock:
        block = self._manager.reign.registry.get(block_id)
        if block is None:
            raise _no_block(block_id)
        return block

    def _check_seen(self, block_id: str) -> None:
        """What a key may not ask is to it as if it were not there."""
        block = self._manager.desired.blocks.get(block_id)
        if block is not None and not may_ask(block.record.model, block_id):
            raise _no_block(block_id)

    def _known_worker(self, worker_id: str) -> WorkerRecord:
        reign = self._manager.reign
        if reign.lives.get(worker_id) is None and worker_id not in self._manager.desired.workers:
            raise NotFound(f"there is no worker '{worker_id}'; 'penstock worker list' shows them")
        return reign.record(worker_id)


def _no_block(block_id: str) -> UnknownModel:
    return UnknownModel(f"there is no block '{block_id}'; 'penstock block list' shows them")


def _kinds(asked: Sequence[str]) -> frozenset[str]:
    """What the caller is told of; raises where it asks for what it may not see."""
    if unknown := sorted(set(asked).difference(KINDS)):
        raise InvalidRequest(f"there is nothing to be watched called '{unknown[0][:80]}': there are {', '.join(KINDS)}")
    caller = watching.get()
    may_see_keys = caller is not None and caller.may(CHANGING)
    if "keys" in asked and not may_see_keys:
        raise Forbidden("the keys of a cluster are shown to whoever has the scope 'admin'")
    return frozenset(asked) or frozenset(KINDS).difference(() if may_see_keys else ("keys",))
