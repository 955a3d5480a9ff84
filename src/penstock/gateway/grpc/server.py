"""The gateway's gRPC server: inference, health, reflection."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.gateway.grpc.oip import OipGrpc, forgiving, guarded
from penstock.pb.inference import grpc_service_pb2, grpc_service_pb2_grpc
from penstock.pb.pool import POOL

_DESCRIPTOR: Any = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE: str = _DESCRIPTOR.full_name
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


def _methods_of(servicer: Servicer) -> Iterator[tuple[str, Any]]:
    """What it has itself; of the rest gRPC says UNIMPLEMENTED, where the generated code would raise."""
    for method in _DESCRIPTOR.methods:
        name = method.name
        if getattr(type(servicer), name) is not getattr(Servicer, name):
            parse, encode = GetMessageClass(method.input_type).FromString, GetMessageClass(method.output_type)
            is_stream = method.client_streaming
            make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
            yield name, make(guarded(name, getattr(servicer, name)), forgiving(parse), encode.SerializeToString)
