"""The gateway's gRPC server: inference, health, reflection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.core.cluster.addresses import Address
from penstock.core.config import Limits
from penstock.core.errors import ConfigError, Draining, PenstockError
from penstock.core.principals import ANY_SCOPE, NO_SCOPES, Needs
from penstock.endpoints.connection_limits import compute_max_grpc_connections, raise_file_limit
from penstock.endpoints.grpc.grpc_traffic import CHECK_S, GrpcTraffic
from penstock.endpoints.guard import get_declared_needs
from penstock.features.direct.direct_grpc import DirectGrpc
from penstock.features.edge.gateway_sockets import GatewaySockets
from penstock.gateway.blocks.block_grpc import BlockGrpc, create_packet_reader
from penstock.gateway.native_grpc.native_server import NativeServer
from penstock.gateway.oip.grpc_service import (
    OipGrpc,
    create_control_reader,
    create_infer_reader,
    wrap_with_guard,
    wrap_with_message,
    wrap_with_readable_message,
)
from penstock.gateway.oip.message_size import ENVELOPE_BYTES
from penstock.pb.blocks import inference_pb2
from penstock.pb.inference import grpc_service_pb2
from penstock.pb.pool import POOL
from penstock.pb.v1 import access_pb2
from penstock.serving.admission import Admission
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.freed_memory import return_freed_memory
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.grpc_listener.grpc_server import GRPC_LOGGER, grpc_server
from penstock.wire.tcp_connections import close_port_connections

_DESCRIPTOR: Any = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE: str = _DESCRIPTOR.full_name
_DIRECT: Any = access_pb2.DESCRIPTOR.services_by_name["Direct"]
_BLOCKS: Any = inference_pb2.DESCRIPTOR.services_by_name["BlockInferenceService"]
BLOCK_SERVICE: str = _BLOCKS.full_name
_HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
# Readers of messages, for methods that handle errors of the reader themselves.
_READERS: Mapping[str, Callable[[Limits, Admission], Any]] = {
    f"{SERVICE}.ModelInfer": create_infer_reader,
    f"{SERVICE}.ModelStreamInfer": create_infer_reader,
    f"{BLOCK_SERVICE}.infer": create_packet_reader,
}
IDLE_MS = 15 * 60 * 1000  # a client whose connection was closed between calls opens another by itself
RETURN_S = 1.0  # between two looks for memory that large messages have freed
RETURNED_BYTES = 64 * 1024 * 1024  # less freed memory is not returned to the system
SOCKET_MODE = 0o666  # the permissions of its folder decide who may connect
_SERIALIZE = methodcaller("SerializeToString")  # also accepts a SerializedResponse
DELIVERY_S = 0.02  # by then, clients have received the answers written before
END_TIMEOUT_S = 0.5  # time for calls to end after their connections were closed
DEAD_AFTER_MS = 60 * 1000  # an idle connection is pinged after this time, and closed after it again without an answer


class GrpcServer:
    """A gRPC server with inference, health and reflection, optionally behind the native server (pygrpc-native)."""

    def __init__(
        self,
        edge: OipGrpc,
        limits: Limits,
        *further_services: object,
        direct: DirectGrpc | None = None,
        blocks: BlockGrpc | None = None,
        is_port_shared: bool = True,
        backend_folder: Path | None = None,
        sockets: GatewaySockets | None = None,
    ) -> None:
        """Create the server.

        `further_services` implement methods that `edge` does not have. `is_port_shared`: other gateways may listen on
        the same port. `backend_folder`: a folder that only this user can open. If it is given, the native server has
        the port, and forwards all methods except ModelInfer to this server through a socket in that folder. `sockets`:
        the unix sockets of a server behind the edge, which sends ModelInfer to the native server and other methods to
        this server.
        """
        self._returned_bytes = 0
        self._server = grpc_server(
            options=[
                ("grpc.max_receive_message_length", limits.max_message_bytes + ENVELOPE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(is_port_shared)),
                ("grpc.max_concurrent_streams", limits.max_connection_calls),
                # Calls that wait to be accepted. Beyond gRPC's default of 1,000 it cancels calls at random.
                ("grpc.server.max_pending_requests", limits.max_inflight_requests),
                ("grpc.server.max_pending_requests_hard_limit", 2 * limits.max_inflight_requests),
                ("grpc.max_metadata_size", limits.max_header_bytes),
                ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
                ("grpc.max_allowed_incoming_connections", compute_max_grpc_connections(limits, raise_file_limit())),
                ("grpc.server_handshake_timeout_ms", int(1000 * limits.header_timeout_s)),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.keepalive_time_ms", DEAD_AFTER_MS),
                ("grpc.keepalive_timeout_ms", DEAD_AFTER_MS),
                # With the probe, flow-control windows would grow even for messages that are not awaited.
                ("grpc.http2.bdp_probe", 0),
            ],
            arrived=edge.traffic.arrived,
        )
        logging.getLogger(GRPC_LOGGER).addFilter(is_unexpected)
        self._traffic = edge.traffic
        self._tasks = BackgroundTasks("grpc")
        self._port = 0
        self.needs: dict[str, Needs] = {}  # the declared scopes, by method
        self._edge = edge
        self._limits = limits
        self._add_service(_DESCRIPTOR, *further_services, edge)
        if direct is not None:
            self._add_service(_DIRECT, direct)
        if blocks is not None:
            self._add_service(_BLOCKS, blocks)
        self._health = health_aio.HealthServicer()
        self._add_third_party(_HEALTH, NO_SCOPES, Check=self._health.Check, Watch=self._health.Watch)
        further_names = {str(_DIRECT.full_name): direct, BLOCK_SERVICE: blocks}
        self._services = (SERVICE, *(name for name, service in further_names.items() if service is not None))
        reflect = reflection.aio.ReflectionServicer(self._services, pool=POOL).ServerReflectionInfo
        self._add_third_party(
            _REFLECTION, ANY_SCOPE, ServerReflectionInfo=partial(_serve_reflection, reflect, self._traffic)
        )
        self._native: NativeServer | None = None
        self._socket = Path(sockets.grpc) if sockets is not None else None
        needs = self.needs[f"{SERVICE}.ModelInfer"]
        if sockets is not None and sockets.native:
            self._native = NativeServer(edge, limits, needs, False, Path(sockets.native))
        elif backend_folder is not None and sockets is None:
            token = token_hex(4)
            self._socket = backend_folder / f"grpc-{token}"
            edge.default_client = "127.0.0.1"
            self._native = NativeServer(edge, limits, needs, is_port_shared, backend_folder / f"native-{token}")

    def _add_third_party(self, service: Any, needs: Needs, **answers: Any) -> None:
        """Add a third-party service, with our limit on its messages and our errors."""
        handlers = {
            name: self._make_handler(service.methods_by_name[name], _drop_principal(answer), needs)
            for name, answer in answers.items()
        }
        self._server.add_registered_method_handlers(service.full_name, handlers)

    def _add_service(self, service: Any, *edges: object) -> None:
        methods = dict(method for each in edges for method in self._list_handlers(service, each))
        self._server.add_registered_method_handlers(service.full_name, methods)

    def _list_handlers(self, service: Any, edge: object) -> Iterator[tuple[str, Any]]:
        """Yield the handlers of the methods that `edge` has. gRPC answers other methods with UNIMPLEMENTED."""
        for method in service.methods:
            if (answer := getattr(edge, method.name, None)) is not None:
                full = answer if method.full_name in _READERS else _drop_context(answer)
                yield method.name, self._make_handler(method, full, get_declared_needs(answer))

    def _make_handler(self, method: Any, answer: Any, needs: Needs) -> Any:
        """Return a handler that takes a stream of requests, so that GrpcTraffic and not gRPC reads them."""
        self.needs[method.full_name] = needs
        if make_reader := _READERS.get(method.full_name):
            read: Any = make_reader(self._limits, self._edge.admission)
        else:
            read = create_control_reader(GetMessageClass(method.input_type).FromString, self._limits.max_control_bytes)
            answer = answer if method.client_streaming else wrap_with_readable_message(answer)
        if not method.client_streaming:
            answer = wrap_with_message(answer, self._traffic, make_reader is not None)
        is_stream = method.server_streaming
        make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        answer = wrap_with_guard(method.name, answer, self._edge, needs)
        return make(answer, self._traffic.measured(read), _SERIALIZE)

    async def start(self, host: str, port: int, certificates: Certificates) -> int:
        try:
            self._port = await self._open(host, port, certificates)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot listen for gRPC on {Address(host, port)}: choose another --grpc-port") from error
        self._tasks.supervise("grpc-traffic", self._traffic.check, every=CHECK_S)
        self._tasks.supervise("large-messages", self._return_memory, every=RETURN_S)
        return self._port

    async def _return_memory(self) -> None:
        """Return the memory of large messages to the system; the C library would keep it."""
        freed_bytes = self._traffic.transit.room.freed_bytes
        if freed_bytes - self._returned_bytes > RETURNED_BYTES:
            self._returned_bytes = freed_bytes
            await asyncio.to_thread(return_freed_memory)

    async def _open(self, host: str, port: int, certificates: Certificates) -> int:
        if self._socket is None:
            port = certificates.add_port(self._server, str(Address(host, port)))
            await self._server.start()
            return port
        self._socket.unlink(missing_ok=True)  # left by a gateway that was killed
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        self._socket.chmod(SOCKET_MODE)
        if self._native is None:
            return port
        try:
            return await self._native.open(host, port, str(self._socket), DEAD_AFTER_MS)
        except (OSError, ConfigError):
            await self._server.stop(None)
            raise

    async def set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Stop the server after up to `grace_s` for running calls.

        Connections are closed before gRPC stops: clients see UNAVAILABLE and retry. gRPC itself would cancel the calls
        that arrive meanwhile, without a reason.
        """
        self._traffic.reject_waiting(Draining("this server is shutting down; call another"))
        deadline = asyncio.get_running_loop().time() + grace_s
        await asyncio.sleep(min(DELIVERY_S, grace_s))
        while self._traffic.running and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DELIVERY_S)
        if self._native is not None:
            await self._native.close()
        elif self._socket is None:
            close_port_connections(self._port)
        await self._server.stop(END_TIMEOUT_S)
        await self._tasks.close()


def is_unexpected(record: logging.LogRecord) -> bool:
    """Return False for log records of gRPC about clients that disconnect early or send headers that are not text."""
    return record.exc_info is None or not isinstance(record.exc_info[1], grpc.aio.InternalError | UnicodeDecodeError)


def _drop_context(answer: Any) -> Any:
    """Wrap a method that takes a message and a principal, so that it also accepts the call's context."""
    return lambda message, context, principal: answer(message, principal)


def _drop_principal(answer: Any) -> Any:
    """Wrap a third-party method, which takes a message and a context, so that it also accepts a principal."""
    return lambda message, context, principal: answer(message, context)


async def _serve_reflection(answer: Any, traffic: GrpcTraffic, messages: object, context: Any) -> None:
    async for answered in answer(_raise_errors(traffic.messages(context)), context):
        await context.write(answered)


async def _raise_errors(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        if isinstance(message, PenstockError):
            raise message
        yield message
