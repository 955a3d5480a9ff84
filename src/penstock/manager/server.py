"""Opens a manager's gRPC door: for workers and gateways, and for operators."""

from collections.abc import Callable

import grpc

from penstock.manager.admin import ClusterService
from penstock.manager.leader_service import LeaderService
from penstock.manager.manager import Manager
from penstock.manager.service import ManagerService
from penstock.pb.v1 import cluster_pb2_grpc, leader_pb2_grpc, manager_pb2_grpc
from penstock.wire.channels import MANAGER_SERVER
from penstock.wire.grpc_server import grpc_server

AddService = Callable[[grpc.aio.Server], None]


async def serve_manager(manager: Manager, *addresses: str, further: tuple[AddService, ...] = ()) -> grpc.aio.Server:
    """`further` are services of others that it has beside its own."""
    server = grpc_server(MANAGER_SERVER)
    manager_pb2_grpc.add_ManagerServicer_to_server(ManagerService(manager), server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterService(manager), server)
    leader_pb2_grpc.add_LeadersServicer_to_server(LeaderService(manager), server)
    for add in further:
        add(server)
    for address in addresses:
        server.add_insecure_port(address)
    await server.start()
    return server
