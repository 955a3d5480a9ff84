"""What operators ask of rollouts, over gRPC: any manager tells of them, the one that leads changes them."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import structlog

from penstock.access.guard import needs_scope
from penstock.core.cluster.answer_counts import quantile_s
from penstock.core.errors import PenstockError
from penstock.core.principals import Scope
from penstock.manager.rollouts.evidence import Sample
from penstock.manager.rollouts.plan import RolledBlock
from penstock.manager.rollouts.rollout import Rollout
from penstock.manager.rollouts.runs import Rollouts, now
from penstock.manager.telling.etags import tagged
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc
from penstock.wire.failures import encode_failure

log = structlog.get_logger()
Context: TypeAlias = grpc.aio.ServicerContext


class RolloutService(cluster_pb2_grpc.RolloutsServicer):
    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    @needs_scope(Scope.ADMIN)
    async def StartRollout(self, request: pb.StartRolloutRequest, context: Context) -> pb.RolloutResponse:  # noqa: N802
        try:
            name = await self._rollouts.begin(request.plan)
        except PenstockError as error:
            return _refused(error)
        return self._told(name)

    @needs_scope(Scope.METRICS)
    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: Context) -> pb.ListRolloutsResponse:  # noqa: N802
        try:
            return pb.ListRolloutsResponse(rollouts=self.statuses(request.name))
        except PenstockError as error:
            return pb.ListRolloutsResponse(failure=encode_failure(error))

    @needs_scope(Scope.ADMIN)
    async def PauseRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:  # noqa: N802
        return await self._change(self._rollouts.pause, request)

    @needs_scope(Scope.ADMIN)
    async def ResumeRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:  # noqa: N802
        return await self._change(self._rollouts.resume, request)

    @needs_scope(Scope.ADMIN)
    async def UndoRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:  # noqa: N802
        return await self._change(self._rollouts.undo, request)

    @needs_scope(Scope.ADMIN)
    async def ForgetRollout(self, request: pb.ChangeRolloutRequest, context: Context) -> pb.RolloutResponse:  # noqa: N802
        try:
            await self._rollouts.forget(request.name, request.expected)
        except PenstockError as error:
            return _refused(error)
        return pb.RolloutResponse()

    async def _change(
        self, change: Callable[[str, str], Awaitable[None]], request: pb.ChangeRolloutRequest
    ) -> pb.RolloutResponse:
        try:
            await change(request.name, request.expected)
        except PenstockError as error:
            return _refused(error)
        return self._told(request.name)

    def _told(self, name: str) -> pb.RolloutResponse:
        return pb.RolloutResponse(rollout=self.statuses(name)[0])

    def statuses(self, name: str = "") -> list[pb.RolloutStatus]:
        """Of all, or of this one."""
        found = self._rollouts.all(name)
        return [tagged(_status(rollout), self._rollouts.revision(rollout.record.plan.name)) for rollout in found]


def _refused(error: PenstockError) -> pb.RolloutResponse:
    log.warning("not_done", code=error.code, error=error.message)
    return pb.RolloutResponse(failure=encode_failure(error))


def _status(rollout: Rollout) -> pb.RolloutStatus:
    record = rollout.record
    old, new = rollout.seen()
    return pb.RolloutStatus(
        name=record.plan.name,
        phase=record.phase,
        is_paused=record.is_paused,
        weight=record.weight,
        step=record.step + 1 if record.weight and not record.is_over else 0,
        steps=len(record.plan.steps),
        reason=record.reason,
        answers=rollout.answers,
        missing_answers=0 if record.is_over else rollout.missing,
        left_s=0.0 if record.is_over else rollout.left_s(now()),
        old=_block(record.old, old),
        new=_block(record.new, new),
        began=record.began,
        plan=record.plan.model_dump_json(),
    )


def _block(block: RolledBlock, seen: Sample) -> pb.RolledBlockStatus:
    return pb.RolledBlockStatus(
        **block.model_dump(),
        outcomes=seen.outcomes,
        errors=seen.errors + seen.refused,
        p50_s=quantile_s(seen.latencies, 0.5),
        p95_s=quantile_s(seen.latencies, 0.95),
    )
