"""The gateway's gRPC server: inference, health, reflection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.access.guard import declared_needs
from penstock.core.cluster.addresses import Address
from penstock.core.config import Limits
from penstock.core.errors import ConfigError, Draining, PenstockError
from penstock.core.principals import ANY_SCOPE, PUBLIC, Needs
from penstock.gateway.grpc.direct import DirectGrpc
from penstock.gateway.grpc.native import NativeFront
from penstock.gateway.grpc.oip import OipGrpc, control_reader, guarded, infer_reader, received, understood
from penstock.gateway.grpc.oip_wire import ENVELOPE_BYTES
from penstock.gateway.grpc.traffic import GrpcTraffic
from penstock.gateway.turnstile import grpc_connections, widen_files
from penstock.pb.inference import grpc_service_pb2
from penstock.pb.pool import POOL
from penstock.pb.v1 import access_pb2
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.grpc_server import grpc_server
from penstock.wire.tcp_connections import cut_connections

_DESCRIPTOR: Any = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE: str = _DESCRIPTOR.full_name
_DIRECT: Any = access_pb2.DESCRIPTOR.services_by_name["Direct"]
_HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
# These look themselves at what their reader gives.
_INFER = (f"{SERVICE}.ModelInfer", f"{SERVICE}.ModelStreamInfer")
GRPC_LOGGER = "grpc._cython.cygrpc"
IDLE_MS = 15 * 60 * 1000  # a client whose connection was closed between calls opens another by itself
TOLD_S = 0.02  # what was decided is with the clients by then
END_S = 0.5  # what calls get to end whose connection was closed
DEAD_AFTER_MS = 60 * 1000  # without a sign of life, and again without an answer to a ping


class GrpcServer:
    def __init__(
        self,
        edge: OipGrpc,
        limits: Limits,
        *further: object,
        direct: DirectGrpc | None = None,
        is_port_shared: bool = True,
        behind: Path | None = None,
    ) -> None:
        """`further` answer for methods that the edge does not have. A port may be shared with other gateways. `behind`:
        a folder of its user alone, where the native front, which has the port then, finds this server for all but
        ModelInfer."""
        self._server = grpc_server(
            options=[
                ("grpc.max_receive_message_length", limits.max_message_bytes + ENVELOPE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(is_port_shared)),
                ("grpc.max_concurrent_streams", limits.max_connection_calls),
                # What waits to be taken up: beyond 1,000, gRPC's own default cancels calls of others at random.
                ("grpc.server.max_pending_requests", limits.max_inflight_requests),
                ("grpc.server.max_pending_requests_hard_limit", 2 * limits.max_inflight_requests),
                ("grpc.max_metadata_size", limits.max_header_bytes),
                ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
                ("grpc.max_allowed_incoming_connections", grpc_connections(limits, widen_files())),
                ("grpc.server_handshake_timeout_ms", int(1000 * limits.header_timeout_s)),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.keepalive_time_ms", DEAD_AFTER_MS),
                ("grpc.keepalive_timeout_ms", DEAD_AFTER_MS),
                # Else the windows grow with what comes, also of messages that nobody awaits.
                ("grpc.http2.bdp_probe", 0),
            ]
        )
        logging.getLogger(GRPC_LOGGER).addFilter(is_worth_a_line)
        self._traffic = edge.traffic
        self._looking: asyncio.Task[None] | None = None
        self._port = 0
        self.needs: dict[str, Needs] = {}  # by method: what was declared beside each
        self._edge = edge
        self._limits = limits
        self._add(_DESCRIPTOR, *further, edge)
        if direct is not None:
            self._add(_DIRECT, direct)
        self._health = health_aio.HealthServicer()
        self._add_small(_HEALTH, PUBLIC, Check=self._health.Check, Watch=self._health.Watch)
        names = (SERVICE,) if direct is None else (SERVICE, str(_DIRECT.full_name))
        reflect = reflection.aio.ReflectionServicer(names, pool=POOL).ServerReflectionInfo
        self._add_small(_REFLECTION, ANY_SCOPE, ServerReflectionInfo=partial(_stream, reflect, self._traffic))
        self._front: NativeFront | None = None
        if behind is not None:
            token = token_hex(4)
            self._socket = behind / f"grpc-{token}"
            edge.unnamed = "127.0.0.1"
            self._front = NativeFront(
                edge, limits, self.needs[f"{SERVICE}.ModelInfer"], is_port_shared, behind / f"door-{token}"
            )

    def _add_small(self, service: Any, needs: Needs, **answers: Any) -> None:
        """Adds a service that others wrote, with our bound on its messages and our errors."""
        handlers = {
            name: self._handler(service.methods_by_name[name], _for_all(answer), needs)
            for name, answer in answers.items()
        }
        self._server.add_registered_method_handlers(service.full_name, handlers)

    def _add(self, service: Any, *edges: object) -> None:
        methods = dict(method for each in edges for method in self._methods_of(service, each))
        self._server.add_registered_method_handlers(service.full_name, methods)

    def _methods_of(self, service: Any, edge: object) -> Iterator[tuple[str, Any]]:
        """What it has; of the rest gRPC says UNIMPLEMENTED."""
        for method in service.methods:
            if (answer := getattr(edge, method.name, None)) is not None:
                full = answer if method.full_name in _INFER else _of_message(answer)
                yield method.name, self._handler(method, full, declared_needs(answer))

    def _handler(self, method: Any, answer: Any, needs: Needs) -> Any:
        """All are streams to gRPC: so it is we who await messages."""
        self.needs[method.full_name] = needs
        if method.full_name in _INFER:
            read: Any = infer_reader(self._limits, self._traffic.admission)
        else:
            read = control_reader(GetMessageClass(method.input_type).FromString, self._limits.max_control_bytes)
            answer = answer if method.client_streaming else understood(answer)
        if not method.client_streaming:
            answer = received(answer, self._traffic)
        is_stream = method.server_streaming
        make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        answer = guarded(method.name, answer, self._edge, needs)
        return make(answer, read, GetMessageClass(method.output_type).SerializeToString)

    async def start(self, host: str, port: int, certificates: Certificates) -> int:
        try:
            self._port = await self._open(host, port, certificates)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot listen for gRPC on {Address(host, port)}: choose another --grpc-port") from error
        self._looking = asyncio.create_task(self._traffic.look_forever(), name="grpc-traffic")
        return self._port

    async def _open(self, host: str, port: int, certificates: Certificates) -> int:
        if self._front is None:
            port = certificates.add_port(self._server, str(Address(host, port)))
            await self._server.start()
            return port
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        try:
            return await self._front.open(host, port, str(self._socket), DEAD_AFTER_MS)
        except (OSError, ConfigError):
            await self._server.stop(None)
            raise

    async def set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        await self._health.set(SERVICE, status)

    async def stop(self, grace_s: float) -> None:
        """What is inside has so long to end.

        What comes until clients have heard that it stops gRPC would cancel, and say no more. So connections are closed
        before: that is UNAVAILABLE, which clients know how to take.
        """
        self._traffic.turn_away(Draining("this server is shutting down; call another"))
        deadline = asyncio.get_running_loop().time() + grace_s
        await asyncio.sleep(min(TOLD_S, grace_s))
        while self._traffic.running and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(TOLD_S)
        if self._front is None:
            cut_connections(self._port)
        else:
            await self._front.close()
        await self._server.stop(END_S)
        if self._looking is not None:
            self._looking.cancel()


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """What gRPC itself logs: a client that left while its answer was being sent is nothing unexpected, nor are headers
    that are no text."""
    return record.exc_info is None or not isinstance(record.exc_info[1], grpc.aio.InternalError | UnicodeDecodeError)


def _of_message(answer: Any) -> Any:
    """Of a method that looks at its message and at who asks, and no further."""
    return lambda message, context, principal: answer(message, principal)


def _for_all(answer: Any) -> Any:
    """Of a service that knows nothing of principals."""
    return lambda message, context, principal: answer(message, context)


async def _stream(answer: Any, traffic: GrpcTraffic, messages: object, context: Any) -> None:
    async for answered in answer(_readable(traffic.messages(context)), context):
        await context.write(answered)


async def _readable(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        if isinstance(message, PenstockError):
            raise message
        yield message
