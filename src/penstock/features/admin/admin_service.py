"""Administration of a cluster over gRPC. Every manager answers reads; only the leader answers writes."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from penstock.core.blocks import REGISTRY_SOURCE, BlockRole, WorkerRecord
from penstock.core.errors import Forbidden, InvalidRequest, ModelNotReady, NotFound, UnknownModel
from penstock.core.principals import ADMIN_SCOPES, Scope
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.guarded_server import Context, check_change, may_use, stream_caller
from penstock.features.admin.changes import BlockChanges, WorkerChanges, read_spec_fields
from penstock.features.admin.cluster_metrics import ClusterOverview
from penstock.features.admin.cluster_watch import KINDS, ClusterWatch, StatusSource
from penstock.features.admin.resources import Statuses, make_event_status
from penstock.manager.control_plane import ControlPlane, now
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.desired_state import BLOCKS, WORKERS, encode
from penstock.manager.publishing.etags import require_etag
from penstock.manager.term import EventDraft
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc, manager_pb2
from penstock.storage.metadata.metadata_store import Write
from penstock.wire.channels import Channels
from penstock.wire.failures import encode_failure

log = structlog.get_logger()
R = TypeVar("R")
NOTHING: Mapping[str, StatusSource] = {}
MAX_LISTED = 1000  # events per answer
LEADER_S = 2.0  # time for the leader to answer another manager
# Marks calls of other managers, so that a manager that no longer leads does not forward them again.
FORWARDED = ("penstock-asked", "manager")


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(
        self,
        control: ControlPlane,
        deployer: Deployer,
        overview: ClusterOverview,
        managers: Channels,
        watched: Mapping[str, StatusSource] = NOTHING,
    ) -> None:
        """Create the service.

        `managers` opens channels to other managers; `watched` returns the statuses that features provide, by kind.
        """
        self._control = control
        self._deployer = deployer
        self._overview = overview
        self._managers = managers
        self._statuses = Statuses(control)
        self._watch = ClusterWatch(control, overview, watched)
        self._changing = asyncio.Lock()  # held from reading a record until its change is applied

    # --- reads

    @needs_scope(Scope.METRICS, Scope.JOIN)
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        control, election = self._control, self._control.election
        desired, leader = control.desired, election.leader
        answer = await self._forward_to_leader(pb.StatusResponse, request, context)
        if answer is not None and not answer.is_leader:
            leader = None  # the term of the known leader is over
        leader_id = leader.manager_id if leader is not None else ""
        status = pb.StatusResponse(
            manager_id=election.manager_id,
            is_leader=bool(control.epoch),
            leader=leader.address if leader is not None else "",
            epoch=election.leader_epoch,
            revision=desired.revision,
            managers=[
                pb.ManagerStatus(manager_id=each.manager_id, address=each.address, is_leader=name == leader_id)
                for name, each in sorted(election.managers.items())
            ],
            gateways=[manager_pb2.GatewayMember(**each._asdict()) for each in desired.gateways.list_members()],
            membership=desired.membership,
        )
        if answer is not None:
            status.workers.update(answer.workers)
            status.blocks.update(answer.blocks)
        else:
            status.workers.update(Counter(str(record.state) for record in control.term.liveness.get_records().values()))
            status.blocks.update(
                Counter(self._statuses.find_block_state(block) for block in control.term.blocks.list_shown_blocks())
            )
        return status

    @needs_scope(Scope.METRICS)
    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        if answer := await self._forward_to_leader(pb.ListWorkersResponse, request, context):
            return answer
        if not request.worker_id:
            return pb.ListWorkersResponse(workers=self._statuses.list_workers())
        self._find_worker(request.worker_id)
        return pb.ListWorkersResponse(workers=[self._statuses.make_worker_status(request.worker_id)])

    @needs_scope(Scope.METRICS)
    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> pb.ListBlocksResponse:
        self._check_visible(request.block_id)
        answer = await self._forward_to_leader(pb.ListBlocksResponse, request, context)
        if answer is not None and answer.HasField("failure"):
            return answer
        if answer is None and request.block_id:
            return pb.ListBlocksResponse(blocks=[self._statuses.make_block_status(self._find_block(request.block_id))])
        blocks = self._statuses.list_blocks(request.model) if answer is None else answer.blocks
        return pb.ListBlocksResponse(blocks=[each for each in blocks if may_use(each.spec.model, each.block_id)])

    @needs_scope(Scope.METRICS)
    async def ExplainBlock(self, request: pb.ExplainBlockRequest, context: Context) -> pb.ExplainBlockResponse:
        self._check_visible(request.block_id)
        if answer := await self._forward_to_leader(pb.ExplainBlockResponse, request, context):
            return answer
        self._control.check_leads()
        block = self._find_block(request.block_id)
        return pb.ExplainBlockResponse(sentences=self._control.term.explain_placement(block.block_id))

    @needs_scope(Scope.METRICS)
    async def Events(self, request: pb.EventsRequest, context: Context) -> pb.EventsResponse:
        limit = min(request.limit or 100, MAX_LISTED)
        found = self._control.events.read(request.after, limit, request.kind, request.subject, request.before)
        return pb.EventsResponse(events=[make_event_status(number, event) for number, event in found])

    @needs_scope(Scope.METRICS)
    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        if answer := await self._forward_to_leader(pb.ListSessionsResponse, request, context):
            return answer
        gateways = []
        for each in self._control.desired.gateways.gateways:
            counts = self._overview.sessions.get(each.gateway_id)
            counted = manager_pb2.SessionCounts(**counts) if counts is not None else None
            gateways.append(pb.GatewaySessions(gateway_id=each.gateway_id, counts=counted))
        return pb.ListSessionsResponse(gateways=gateways)

    @needs_scope(Scope.METRICS)
    async def WatchCluster(self, request: pb.WatchClusterRequest, context: Context) -> AsyncIterator[pb.ClusterChange]:
        self._control.check_leads()
        async for change in self._watch.watch_changes(_read_kinds(request.kinds)):
            yield change
        raise self._control.election.make_not_leading_error()

    # --- writes

    @needs_scope(Scope.ADMIN)
    async def RemoveWorker(self, request: pb.RemoveWorkerRequest, context: Context) -> pb.RemoveWorkerResponse:
        self._control.check_leads()
        worker_id = request.worker_id
        self._find_worker(worker_id)
        life = self._control.term.liveness.get(worker_id)
        record = WorkerRecord(removed=life.incarnation) if life is not None else None
        write = Write(WORKERS + worker_id, encode(record) if record is not None else None)
        event = EventDraft("worker_removed", worker_id, "removed by an operator")
        with require_etag(request.expected, WORKERS + worker_id, self._control.desired.revisions) as compares:
            await self._control.events.commit([write], [event], compares)
        self._control.term.remove_worker(worker_id, now())
        await self._control.notify(is_changed=True)
        return pb.RemoveWorkerResponse()

    @needs_scope(Scope.ADMIN)
    async def ChangeWorker(self, request: pb.ChangeWorkerRequest, context: Context) -> pb.WorkerResponse:
        async with self._changing:
            await self._change_worker(request.worker_id, WorkerChanges.read(request.changes), request.expected)
        return pb.WorkerResponse(worker=self._statuses.make_worker_status(request.worker_id))

    @needs_scope(Scope.ADMIN)
    async def DeployBlock(self, request: pb.DeployBlockRequest, context: Context) -> pb.DeployBlockResponse:
        self._control.check_leads()
        model = request.spec.model
        check_change(model, (block.block_id for block in self._control.desired.list_model_blocks(model)))
        choice = await self._deployer.choose(model, request.spec.version, request.spec.source)
        choice = choice._replace(spec=read_spec_fields(request.spec), is_added_to_others=request.is_beside)
        made = pb.DeployBlockResponse(block_ids=await self._deployer.deploy(choice))
        if request.wait_s:
            try:
                await self._deployer.wait_loaded(choice.model, request.wait_s)
            except ModelNotReady as error:  # the block stays deployed, and the answer has the reason
                log.warning("deployed_block_not_loaded", blocks=list(made.block_ids), error=error.message)
                made.failure.CopyFrom(encode_failure(error))
        return made

    @needs_scope(Scope.ADMIN)
    async def RemoveBlock(self, request: pb.RemoveBlockRequest, context: Context) -> pb.RemoveBlockResponse:
        self._control.check_leads()
        block_id = request.block_id
        self._check_visible(block_id)
        block = self._find_block(block_id)
        others = [each for each in self._control.desired.list_model_blocks(block.model) if each.block_id != block_id]
        is_last = not any(each.record.role is BlockRole.CHOSEN for each in others)
        event = EventDraft("block_removed", block_id, f"model '{block.model}' version {block.version}")
        # The last block of a folder's model is unloaded, not deleted, because the folder would deploy it again.
        records = (block.record, *(each.record for each in others))
        is_kept = is_last and not all(each.source.startswith(REGISTRY_SOURCE) for each in records)
        with require_etag(request.expected, BLOCKS + block_id, self._control.desired.revisions) as compares:
            if is_kept and block.record.role is BlockRole.CHOSEN:
                await self._deployer.unload(block.model, event, compares=compares)
            elif not is_kept or block.record.role is not BlockRole.WITHDRAWN:
                spares = [each.block_id for each in others if is_last and each.record.role is BlockRole.SPARE]
                writes = [Write(BLOCKS + each, None) for each in (block_id, *spares)]
                await self._control.events.commit(writes, [event], compares)
        return pb.RemoveBlockResponse()

    @needs_scope(Scope.ADMIN)
    async def ChangeBlock(self, request: pb.ChangeBlockRequest, context: Context) -> pb.BlockResponse:
        self._control.check_leads()
        self._check_visible(request.block_id)
        block = self._find_block(request.block_id)
        async with self._changing:
            fields = BlockChanges.read(request.changes).apply_to(block.record)
            event = EventDraft("block_changed", block.block_id, f"changed: {', '.join(sorted(fields)) or 'nothing'}")
            if "replicas" in fields:
                event = EventDraft("block_scaled", block.block_id, f"scaled to {fields['replicas']} replicas")
            await self._deployer.change_block(block.block_id, event, expected=request.expected, **fields)
        return pb.BlockResponse(block=self._statuses.make_block_status(self._find_block(block.block_id)))

    async def _change_worker(self, worker_id: str, changes: WorkerChanges, expected: str) -> None:
        self._control.check_leads()
        record = changes.apply_to(self._find_worker(worker_id))
        text = "draining: its blocks move to other workers" if record.is_draining else "not draining: it may get blocks"
        events = [EventDraft("worker_drained" if record.is_draining else "worker_open", worker_id, text)]
        if changes.is_draining is None:
            labels = ", ".join(f"{key}={value}" for key, value in sorted(record.labels.items()))
            events = [EventDraft("worker_labelled", worker_id, f"labels: {labels or 'none'}")]
        write = Write(WORKERS + worker_id, None if record == WorkerRecord() else encode(record))
        with require_etag(expected, WORKERS + worker_id, self._control.desired.revisions) as compares:
            await self._control.events.commit([write], events, compares)

    # --- parts

    async def _forward_to_leader(self, kind: type[R], request: Any, context: Context) -> R | None:
        """Forward the request to the leader, because only the leader receives the workers' reports.

        Return None if this manager leads or the leader does not answer.
        """
        leader = self._control.election.leader
        is_forwarded = context is not None and FORWARDED in (context.invocation_metadata() or ())
        if self._control.epoch or leader is None or not leader.address or is_forwarded:
            return None
        try:
            async with self._managers.open(leader.address) as channel:
                call = getattr(cluster_pb2_grpc.ClusterStub(channel), kind.__name__.removesuffix("Response"))
                answer = await call(request, timeout=LEADER_S, metadata=(FORWARDED,))
                return answer if isinstance(answer, kind) else None
        except grpc.aio.AioRpcError as error:
            log.info("leader_unreachable", leader=leader.address, error=error.details())
            return None

    def _find_block(self, block_id: str) -> DeployedBlock:
        block = self._control.term.blocks.get(block_id)
        if block is None:
            raise _make_unknown_block_error(block_id)
        return block

    def _check_visible(self, block_id: str) -> None:
        """Raise UnknownModel for a block that the caller's key may not use, as if the block did not exist."""
        block = self._control.desired.blocks.get(block_id)
        if block is not None and not may_use(block.record.model, block_id):
            raise _make_unknown_block_error(block_id)

    def _find_worker(self, worker_id: str) -> WorkerRecord:
        term = self._control.term
        if term.liveness.get(worker_id) is None and worker_id not in self._control.desired.workers:
            raise NotFound(f"there is no worker '{worker_id}'; 'penstock worker list' shows all workers")
        return term.get_worker_record(worker_id)


def _make_unknown_block_error(block_id: str) -> UnknownModel:
    return UnknownModel(f"there is no block '{block_id}'; 'penstock block list' shows all blocks")


def _read_kinds(requested: Sequence[str]) -> frozenset[str]:
    """Return the kinds of statuses that the caller watches; raise Forbidden for kinds that are not permitted."""
    if unknown := sorted(set(requested).difference(KINDS)):
        raise InvalidRequest(f"unknown kind '{unknown[0][:80]}': a watch can have {', '.join(KINDS)}")
    caller = stream_caller.get()
    may_see_keys = caller is not None and caller.may(ADMIN_SCOPES)
    if "keys" in requested and not may_see_keys:
        raise Forbidden("watching the keys of a cluster needs the scope 'admin'")
    return frozenset(requested) or frozenset(KINDS).difference(() if may_see_keys else ("keys",))
