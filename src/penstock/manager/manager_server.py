"""The gRPC server of a manager, for workers, gateways, other managers and operators."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.core.principals import Scope
from penstock.endpoints.connection_limits import compute_max_grpc_connections, raise_file_limit
from penstock.endpoints.guard import Guard, create_open_guard, needs_scope
from penstock.endpoints.guarded_server import GuardedServer
from penstock.manager.control_plane import ControlPlane
from penstock.manager.manager import Manager
from penstock.manager.manager_service import ManagerService
from penstock.pb.v1 import leader_pb2_grpc, manager_pb2_grpc
from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.pb.v1.leader_pb2_grpc import LeadersServicer
from penstock.wire.channels import MANAGER_SERVER_OPTIONS
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.grpc_listener.grpc_server import grpc_server
from penstock.wire.grpc_listener.header_memory import ArrivedMessages

AddService = Callable[[GuardedServer], None]


class LeaderService(LeadersServicer):
    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    @needs_scope(*Scope)
    async def Leader(self, request: LeaderRequest, context: grpc.aio.ServicerContext) -> LeaderResponse:  # noqa: N802
        with suppress(PenstockError):  # another manager leads, or the store is unavailable
            await self._control.check_peer_epoch(request.history, request.epoch)
        election = self._control.election
        epoch = election.epoch
        return LeaderResponse(
            manager_id=election.manager_id,
            is_leader=epoch > 0,
            leader=election.leader.address if election.leader is not None else "",
            epoch=epoch or election.leader_epoch,
            managers=[manager.address for manager in election.managers.values()],
            history=self._control.desired.history,
        )


async def serve_manager(
    manager: Manager,
    *addresses: str,
    services: Sequence[AddService] = (),
    guard: Guard | None = None,
    certificates: Certificates | None = None,
    is_behind_edge: bool = False,
) -> grpc.aio.Server:
    """Start a gRPC server with the manager's services and `services`; without a guard, every call is allowed.

    `is_behind_edge`: the address is a unix socket that only the edge uses.
    """
    certificates = certificates or Certificates()
    arrived = ArrivedMessages()
    most = ("grpc.max_allowed_incoming_connections", compute_max_grpc_connections(Limits(), raise_file_limit()))
    server = grpc_server((*MANAGER_SERVER_OPTIONS, most), arrived)
    guarded = GuardedServer(server, guard or create_open_guard(), arrived, is_behind_edge)
    manager_pb2_grpc.add_ManagerServicer_to_server(ManagerService(manager), guarded)
    leader_pb2_grpc.add_LeadersServicer_to_server(LeaderService(manager.control), guarded)
    for add in services:
        add(guarded)
    for address in addresses:
        certificates.add_port(server, address)
    await server.start()
    return server
