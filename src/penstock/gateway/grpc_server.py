"""The gateway's gRPC server: inference, health, reflection."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.gateway.oip_grpc import OipGrpc
from penstock.pb.inference import grpc_service_pb2, grpc_service_pb2_grpc
from penstock.pb.pool import POOL

SERVICE: str = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
# Room for names, shapes and parameters beside the tensors, whose bytes admission counts exactly.
ENVELOPE_BYTES = 1024 * 1024


class GrpcServer:
    def __init__(self, edge: OipGrpc, limits: Limits) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.max_message_bytes + ENVELOPE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 1),
                ("grpc.max_concurrent_streams", limits.max_inflight_requests),
            ]
        )
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(edge, self._server)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE,), self._server, pool=POOL)

    async def start(self, host: str, port: int) -> int:
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen for gRPC on {host}:{port}: choose another --grpc-port") from error
        await self._server.start()
        return int(bound)

    async def set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        await self._health.set(SERVICE, status)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
