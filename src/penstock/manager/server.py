"""Opens a manager's gRPC door: for workers and gateways, and for operators."""

from collections.abc import Callable

import grpc

from penstock.access.guard import Guard, open_guard
from penstock.manager.access.door import GuardedDoor
from penstock.manager.admin.service import ClusterService
from penstock.manager.leading.leader_service import LeaderService
from penstock.manager.manager import Manager
from penstock.manager.service import ManagerService
from penstock.pb.v1 import cluster_pb2_grpc, leader_pb2_grpc, manager_pb2_grpc
from penstock.wire.channels import MANAGER_SERVER
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.grpc_server import grpc_server

AddService = Callable[[GuardedDoor], None]


async def serve_manager(
    manager: Manager,
    *addresses: str,
    further: tuple[AddService, ...] = (),
    guard: Guard | None = None,
    certificates: Certificates | None = None,
) -> grpc.aio.Server:
    """`further` are services of others that it has beside its own. Without a guard nobody is asked anything."""
    certificates = certificates or Certificates()
    server = grpc_server(MANAGER_SERVER)
    door = GuardedDoor(server, guard or open_guard())
    manager_pb2_grpc.add_ManagerServicer_to_server(ManagerService(manager), door)
    cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterService(manager, certificates.files), door)
    leader_pb2_grpc.add_LeadersServicer_to_server(LeaderService(manager), door)
    for add in further:
        add(door)
    for address in addresses:
        certificates.add_port(server, address)
    await server.start()
    return server
