"""The gateway's gRPC server: inference, health, reflection."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.gateway.grpc.oip import OipGrpc, guarded
from penstock.pb.inference import grpc_service_pb2, grpc_service_pb2_grpc
from penstock.pb.pool import POOL

SERVICE: str = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
# Room for names, shapes and parameters beside the tensors, whose bytes admission counts exactly.
ENVELOPE_BYTES = 1024 * 1024
Servicer: TypeAlias = grpc_service_pb2_grpc.GRPCInferenceServiceServicer


class GrpcServer:
    def __init__(self, edge: OipGrpc, limits: Limits, *further: Servicer) -> None:
        """`further` answer for methods that the edge does not have."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.max_message_bytes + ENVELOPE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 1),
                ("grpc.max_concurrent_streams", limits.max_inflight_requests),
            ]
        )
        methods = {name: handler for servicer in (*further, edge) for name, handler in _methods_of(servicer)}
        self._server.add_registered_method_handlers(SERVICE, methods)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE,), self._server, pool=POOL)

    async def start(self, host: str, port: int) -> int:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen for gRPC on {address}: choose another --grpc-port") from error
        await self._server.start()
        return int(bound)

    async def set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        await self._health.set(SERVICE, status)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


class _Methods:
    """Stands in for the server while the generated code registers an edge, to see to its methods first."""

    def __init__(self) -> None:
        self.handlers: Mapping[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same methods once more, for servers that do not know the other call."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers = handlers


def _methods_of(servicer: Servicer) -> Iterator[tuple[str, Any]]:
    """What it has itself; of the rest gRPC says UNIMPLEMENTED, where the generated code would raise."""
    methods = _Methods()
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, methods)
    for name, handler in methods.handlers.items():
        if getattr(type(servicer), name) is not getattr(Servicer, name):
            yield name, guarded(name, handler)
