"""The gRPC service of rollouts. Every manager answers reads; only the leader makes changes."""

# ruff: noqa: N802 - the names are those of the protocol

from penstock.core.cluster.answer_counts import compute_quantile_s
from penstock.core.principals import Scope
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.guarded_server import Context
from penstock.features.rollouts.evidence import Sample
from penstock.features.rollouts.rollout import Rollout
from penstock.features.rollouts.rollout_plan import RolledBlock
from penstock.features.rollouts.rollouts import Rollouts, now
from penstock.manager.publishing.etags import with_etag
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc


class RolloutService(cluster_pb2_grpc.RolloutsServicer):
    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    @needs_scope(Scope.ADMIN)
    async def StartRollout(self, request: pb.StartRolloutRequest, context: Context) -> pb.RolloutResponse:
        return self._make_response(await self._rollouts.begin(request.plan))

    @needs_scope(Scope.METRICS)
    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: Context) -> pb.ListRolloutsResponse:
        return pb.ListRolloutsResponse(rollouts=self.list_statuses(request.name))

    @needs_scope(Scope.ADMIN)
    async def PauseRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:
        await self._rollouts.pause(request.name, request.expected)
        return self._make_response(request.name)

    @needs_scope(Scope.ADMIN)
    async def ResumeRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:
        await self._rollouts.resume(request.name, request.expected)
        return self._make_response(request.name)

    @needs_scope(Scope.ADMIN)
    async def UndoRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:
        await self._rollouts.undo(request.name, request.expected)
        return self._make_response(request.name)

    @needs_scope(Scope.ADMIN)
    async def ForgetRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:
        await self._rollouts.forget(request.name, request.expected)
        return pb.RolloutResponse()

    def _make_response(self, name: str) -> pb.RolloutResponse:
        return pb.RolloutResponse(rollout=self.list_statuses(name)[0])

    def list_statuses(self, name: str = "") -> list[pb.RolloutStatus]:
        """Return the status of the rollout of a name, or of all rollouts."""
        found = self._rollouts.list_rollouts(name)
        return [
            with_etag(_to_status(rollout), self._rollouts.get_revision(rollout.record.plan.name)) for rollout in found
        ]


def _to_status(rollout: Rollout) -> pb.RolloutStatus:
    record = rollout.record
    old, new = rollout.get_outcomes()
    return pb.RolloutStatus(
        name=record.plan.name,
        phase=record.phase,
        is_paused=record.is_paused,
        weight=record.weight,
        step=record.step + 1 if record.weight and not record.is_over else 0,
        steps=len(record.plan.steps),
        reason=record.reason,
        answers=rollout.answers,
        missing_answers=0 if record.is_over else rollout.count_missing_answers,
        left_s=0.0 if record.is_over else rollout.compute_left_s(now()),
        old=_to_block_status(record.old, old),
        new=_to_block_status(record.new, new),
        began=record.began,
        plan=record.plan.model_dump_json(),
    )


def _to_block_status(block: RolledBlock, seen: Sample) -> pb.RolledBlockStatus:
    return pb.RolledBlockStatus(
        **block.model_dump(),
        outcomes=seen.outcomes,
        errors=seen.errors + seen.refused,
        p50_s=compute_quantile_s(seen.latencies, 0.5),
        p95_s=compute_quantile_s(seen.latencies, 0.95),
    )
