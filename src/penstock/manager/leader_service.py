"""Says who leads, whoever of the managers is asked."""

import grpc

from penstock.manager.election import Election
from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.pb.v1.leader_pb2_grpc import LeadersServicer


class LeaderService(LeadersServicer):
    def __init__(self, election: Election) -> None:
        self._election = election

    async def Leader(self, request: LeaderRequest, context: grpc.aio.ServicerContext) -> LeaderResponse:  # noqa: N802
        election = self._election
        epoch = election.epoch
        return LeaderResponse(
            manager_id=election.manager_id,
            is_leader=epoch > 0,
            leader=election.leader.address if election.leader is not None else "",
            epoch=epoch or election.leader_epoch,
            managers=[manager.address for manager in election.managers.values()],
        )
