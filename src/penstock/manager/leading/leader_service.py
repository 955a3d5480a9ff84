"""Says who leads, whoever of the managers is asked."""

from contextlib import suppress

import grpc

from penstock.access.guard import needs_scope
from penstock.core.errors import PenstockError
from penstock.core.principals import Scope
from penstock.manager.manager import Manager
from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.pb.v1.leader_pb2_grpc import LeadersServicer


class LeaderService(LeadersServicer):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    @needs_scope(*Scope)
    async def Leader(self, request: LeaderRequest, context: grpc.aio.ServicerContext) -> LeaderResponse:  # noqa: N802
        with suppress(PenstockError):  # another leads, or nobody can tell: then it has not proved it
            await self._manager.prove_reign(request.history, request.epoch)
        election = self._manager.election
        epoch = election.epoch
        return LeaderResponse(
            manager_id=election.manager_id,
            is_leader=epoch > 0,
            leader=election.leader.address if election.leader is not None else "",
            epoch=epoch or election.leader_epoch,
            managers=[manager.address for manager in election.managers.values()],
            history=self._manager.desired.history,
        )
