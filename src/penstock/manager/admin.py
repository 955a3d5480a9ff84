"""What operators ask of a cluster, over gRPC: any manager answers what only reads, the leader what writes."""
# ruff: noqa: N802 - the names are those of the protocol

import json
from collections import Counter
from dataclasses import asdict
from typing import Any, TypeVar

import grpc
import structlog
from pydantic import ValidationError

from penstock.access.guard import needs_scope
from penstock.core.blocks import BlockRecord, BlockRole, Resources, WorkerRecord
from penstock.core.error_text import first_problem
from penstock.core.errors import InvalidRequest, PenstockError, UnknownModel
from penstock.core.principals import Scope
from penstock.manager.deployed_block import DeployedBlock, WorkerState
from penstock.manager.desired import BLOCKS, WORKERS, encode
from penstock.manager.lives import Life
from penstock.manager.manager import Manager, now
from penstock.manager.reign import Load, Notice
from penstock.manager.service import failure_of
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc, manager_pb2
from penstock.storage.metadata.base import Write
from penstock.wire.channels import Channels
from penstock.wire.credentials.files import TlsFiles
from penstock.wire.failures import encode_failure

log = structlog.get_logger()
R = TypeVar("R")
UNKNOWN = "unknown"  # how a worker is, to a manager that does not lead
MAX_LISTED = 1000  # events in one answer
ASK_S = 2.0  # what the leader gets to answer another manager
ASKED = ("penstock-asked", "manager")  # by another manager: who does not lead after all answers what it knows


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, manager: Manager, tls: TlsFiles) -> None:
        """`tls`: what it goes by towards the manager that leads."""
        self._manager = manager
        self._tls = tls

    # --- what only reads

    @needs_scope(Scope.METRICS, Scope.JOIN)
    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        manager, election = self._manager, self._manager.election
        desired, leader = manager.desired, election.leader
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
        if told := await self._ask_leader(pb.StatusResponse, request, context):
            status.workers.update(told.workers)
            status.blocks.update(told.blocks)
        else:
            status.workers.update(Counter(str(life.state) for life in manager.reign.lives.items().values()))
            status.blocks.update(Counter(self._state(block) for block in manager.reign.registry.shown()))
        return status

    @needs_scope(Scope.METRICS)
    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListWorkersResponse:
        if told := await self._ask_leader(pb.ListWorkersResponse, request, context):
            return told
        lives = self._manager.reign.lives.items()
        names = sorted({*lives, *self._manager.desired.workers})
        return pb.ListWorkersResponse(workers=[self._worker(name, lives.get(name)) for name in names])

    @needs_scope(Scope.METRICS)
    async def ListBlocks(
        self, request: pb.ListBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListBlocksResponse:
        if told := await self._ask_leader(pb.ListBlocksResponse, request, context):
            return told
        blocks = [
            block
            for block in self._manager.reign.registry.blocks()
            if request.model in ("", block.model) and (block.is_shown or block.record.role is not BlockRole.SPARE)
        ]
        blocks.sort(key=lambda block: (block.model, int(block.version)))
        return pb.ListBlocksResponse(blocks=[self._block(block) for block in blocks])

    @needs_scope(Scope.METRICS)
    async def ExplainBlock(
        self, request: pb.ExplainBlockRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExplainBlockResponse:
        if told := await self._ask_leader(pb.ExplainBlockResponse, request, context):
            return told
        try:
            self._manager.check_leads()
            block = self._find(request.block_id)
            sentences = self._manager.reign.explain(block.block_id)
        except PenstockError as error:
            return pb.ExplainBlockResponse(failure=encode_failure(error))
        return pb.ExplainBlockResponse(sentences=sentences)

    @needs_scope(Scope.METRICS)
    async def Events(self, request: pb.EventsRequest, context: grpc.aio.ServicerContext) -> pb.EventsResponse:
        limit = min(request.limit or 100, MAX_LISTED)
        found = self._manager.events.read(request.after, limit, request.kind, request.subject)
        return pb.EventsResponse(events=[pb.ClusterEvent(number=number, **dict(event)) for number, event in found])

    # --- what writes

    @needs_scope(Scope.ADMIN)
    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        return pb.DrainWorkerResponse(failure=await failure_of(self._drain(request.worker_id, request.is_draining)))

    @needs_scope(Scope.ADMIN)
    async def RemoveWorker(
        self, request: pb.RemoveWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.RemoveWorkerResponse:
        return pb.RemoveWorkerResponse(failure=await failure_of(self._remove_worker(request.worker_id)))

    @needs_scope(Scope.ADMIN)
    async def DeployBlock(
        self, request: pb.DeployBlockRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeployBlockResponse:
        block_ids: list[str] = []
        failure = await failure_of(self._deploy(request, block_ids))
        return pb.DeployBlockResponse(failure=failure, block_ids=block_ids)

    @needs_scope(Scope.ADMIN)
    async def ScaleBlock(
        self, request: pb.ScaleBlockRequest, context: grpc.aio.ServicerContext
    ) -> pb.ScaleBlockResponse:
        told = Notice("block_scaled", request.block_id, f"it has {request.replicas} replicas")
        change = self._manager.change_block(request.block_id, told, replicas=request.replicas)
        return pb.ScaleBlockResponse(failure=await failure_of(change))

    @needs_scope(Scope.ADMIN)
    async def RemoveBlock(
        self, request: pb.RemoveBlockRequest, context: grpc.aio.ServicerContext
    ) -> pb.RemoveBlockResponse:
        return pb.RemoveBlockResponse(failure=await failure_of(self._remove_block(request.block_id)))

    async def _drain(self, worker_id: str, is_draining: bool) -> None:
        self._manager.check_leads()
        record = self._known_worker(worker_id).model_copy(update={"is_draining": is_draining})
        said = "it gets no more blocks" if is_draining else "it may get blocks again"
        told = Notice("worker_drained" if is_draining else "worker_open", worker_id, said)
        write = Write(WORKERS + worker_id, None if record == WorkerRecord() else encode(record))
        await self._manager.events.commit([write], [told])

    async def _remove_worker(self, worker_id: str) -> None:
        self._manager.check_leads()
        self._known_worker(worker_id)
        life = self._manager.reign.lives.get(worker_id)
        record = WorkerRecord(removed=life.incarnation) if life is not None else None
        write = Write(WORKERS + worker_id, encode(record) if record is not None else None)
        await self._manager.events.commit([write], [Notice("worker_removed", worker_id, "an operator removed it")])
        self._manager.reign.remove(worker_id, now())
        await self._manager.notify(is_sure=True)

    async def _deploy(self, request: pb.DeployBlockRequest, block_ids: list[str]) -> None:
        self._manager.check_leads()
        choice = await self._manager.choose(request.spec.model, request.spec.version, request.spec.source)
        choice = choice._replace(spec=_wishes(request.spec), is_beside=request.is_beside)
        block_ids += await self._manager.deploy(choice)
        if request.wait_s:
            await self._manager.wait_loaded(choice.model, request.wait_s)

    async def _remove_block(self, block_id: str) -> None:
        self._manager.check_leads()
        block = self._find(block_id)
        others = [each for each in self._manager.desired.of_model(block.model) if each.block_id != block_id]
        is_last = not any(each.record.role is BlockRole.CHOSEN for each in others)
        told = Notice("block_removed", block_id, f"model '{block.model}' version {block.version}")
        # The last of a model is unloaded rather than forgotten: its folder would bring it back.
        if is_last and block.record.role is BlockRole.CHOSEN:
            await self._manager.unload(block.model, told)
        else:
            await self._manager.events.commit([Write(BLOCKS + block_id, None)], [told])

    # --- what they are made of

    async def _ask_leader(self, kind: type[R], request: Any, context: grpc.aio.ServicerContext) -> R | None:
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
            raise UnknownModel(f"there is no block '{block_id}'; 'penstock block list' shows them")
        return block

    def _known_worker(self, worker_id: str) -> WorkerRecord:
        reign = self._manager.reign
        if reign.lives.get(worker_id) is None and worker_id not in self._manager.desired.workers:
            raise InvalidRequest(f"there is no worker '{worker_id}'; 'penstock worker list' shows them")
        return reign.record(worker_id)

    def _state(self, block: DeployedBlock) -> str:
        return str(block.state()[0]) if self._manager.epoch else UNKNOWN

    def _worker(self, worker_id: str, life: Life | None) -> pb.WorkerStatus:
        reign = self._manager.reign
        record, facts, load = reign.record(worker_id), reign.facts.get(worker_id), reign.loads.get(worker_id)
        status = pb.WorkerStatus(
            worker_id=worker_id,
            state=str(life.state) if life is not None else UNKNOWN if not self._manager.epoch else "offline",
            incarnation=life.incarnation if life is not None else "",
            silent_s=reign.lives.silent_s(worker_id) if life is not None else 0.0,
            is_draining=record.is_draining,
            is_removed=bool(record.removed) and (life is None or record.removed == life.incarnation),
            blocks=[
                _reported(block.block_id, block.workers[worker_id])
                for block in reign.registry.blocks()
                if worker_id in block.workers
            ],
        )
        if facts is not None:
            told = asdict(facts)
            status.pid = told.pop("pid")
            status.facts.CopyFrom(manager_pb2.WorkerFacts(**told | {"labels": {**facts.labels, **record.labels}}))
        if load is not None:
            status.load.CopyFrom(_load(load))
        return status

    def _block(self, block: DeployedBlock) -> pb.BlockStatus:
        reign = self._manager.reign
        counts = [load.counts[block.block_id] for load in reign.loads.values() if block.block_id in load.counts]
        return pb.BlockStatus(
            block_id=block.block_id,
            spec=_spec(block.record),
            role=block.record.role,
            state=self._state(block),
            reason=block.state()[1] if self._manager.epoch else "",
            revision=block.revision,
            holders=[
                pb.BlockHolder(worker_id=worker, state=found.state, reason=found.reason, is_serving=found.is_serving)
                for worker, found in sorted(block.workers.items())
            ],
            placed=reign.placed(block) if block.is_wanted else [],
            requests=sum(each.requests for each in counts),
            errors=sum(each.errors for each in counts),
            latency_s=sum(each.latency_s for each in counts),
        )


def _wishes(spec: pb.BlockSpec) -> dict[str, Any]:
    """What is asked for of BlockRecord, checked."""
    try:
        metadata = json.loads(spec.metadata or "{}")
    except ValueError as error:
        raise InvalidRequest(f"the block cannot be deployed so: metadata is no JSON: {error}") from error
    try:
        resources = Resources(cpu=spec.cpu, memory_bytes=spec.memory_bytes, gpu_memory_bytes=spec.gpu_memory_bytes)
        record = BlockRecord(
            model=spec.model,
            version="0",  # which it is, is found later
            replicas=spec.replicas,
            resources=resources,
            labels=dict(spec.labels),
            anti_affinity=tuple(spec.anti_affinity),
            metadata=metadata,
            weight=spec.weight if spec.HasField("weight") else 1.0,
        )
    except ValidationError as error:
        raise InvalidRequest(f"the block cannot be deployed so: {first_problem(error)}") from error
    return {name: getattr(record, name) for name in record.model_fields_set - {"model", "version"}}


def _spec(record: BlockRecord) -> pb.BlockSpec:
    return pb.BlockSpec(
        model=record.model,
        version=record.version,
        source=record.source,
        replicas=record.replicas,
        **record.resources.model_dump(),
        labels=record.labels,
        anti_affinity=record.anti_affinity,
        metadata=json.dumps(record.metadata) if record.metadata else "",
        weight=record.weight,
    )


def _reported(block_id: str, found: WorkerState) -> manager_pb2.BlockState:
    return manager_pb2.BlockState(block_id=block_id, **found._asdict())


def _load(load: Load) -> manager_pb2.WorkerLoad:
    counts = [manager_pb2.BlockCounts(block_id=name, **asdict(each)) for name, each in sorted(load.counts.items())]
    told = {name: value for name, value in asdict(load).items() if name != "counts" and value is not None}
    return manager_pb2.WorkerLoad(**told, counts=counts)
