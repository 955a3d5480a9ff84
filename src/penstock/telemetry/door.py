"""A role's health door: whether it lives, whether it is ready, its metrics; over HTTP, and as gRPC's health service.

It takes little of anybody: one short GET a connection, few connections, no body, and never waits long.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import grpc
import orjson
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from penstock.core.cluster.addresses import Address
from penstock.core.errors import BUG, ConfigError, PenstockError, Unauthenticated
from penstock.telemetry.metrics import as_text

log = structlog.get_logger()
MAX_REQUEST_BYTES = 8 * 1024  # its first line and headers
MAX_CONNECTIONS = 64  # of each protocol
REQUEST_S = 5.0  # until the request is whole
ANSWER_S = 10.0  # until the answer is taken
END_S = 2.0  # until a client of TLS has said that it heard the end
LOOK_S = 0.5  # how often gRPC's health is brought up to date
PROBLEM_S = 2.0  # what it takes at most to find out whether the role is ready
SMALL_MESSAGE_BYTES = 4 * 1024

Problem = Callable[[], Awaitable[str]]
Headers = list[tuple[bytes, bytes]]
Refusal = Callable[[Headers, str], PenstockError | None]
Guarding = Callable[[Headers, asyncio.BaseTransport], PenstockError | None]
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout"}
REASONS |= {
    401: "Unauthorized",
    403: "Forbidden",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}
REASONS |= {503: "Service Unavailable"}


class DoorSecurity(NamedTuple):
    """What makes both ports speak TLS."""

    context: ssl.SSLContext
    add_port: Callable[[grpc.aio.Server], Callable[[str], int]]


class Answer(NamedTuple):
    status: int
    body: bytes
    media_type: str = "application/json"


class HealthDoor:
    def __init__(
        self,
        problem: Problem,
        registry: Callable[[], CollectorRegistry],
        refusal: Refusal,
        guarding: Guarding = lambda headers, connection: None,
        health: health_aio.HealthServicer | None = None,
        security: DoorSecurity | None = None,
    ) -> None:
        """`problem` says why the role is not ready, or nothing; `refusal` why a caller is not answered, `guarding` why
        the metrics are not for it. `health` is what another server of the role has, too. Without `security` both ports
        are plain."""
        self._guarding = guarding
        self._security = security
        self._health = health or health_aio.HealthServicer()
        self._problem = problem
        self._registry = registry
        self._refusal = refusal
        self._connections: set[asyncio.Task[None]] = set()
        self._http: asyncio.Server | None = None
        self._grpc: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open_http(self, address: Address) -> Address:
        """Returns where it listens, where the port was left open; raises ConfigError."""
        try:
            tls: dict[str, Any] = {}
            if self._security is not None:
                tls = {"ssl": self._security.context, "ssl_handshake_timeout": REQUEST_S, "ssl_shutdown_timeout": END_S}
            self._http = await asyncio.start_server(
                self._connected, address.host, address.port, limit=MAX_REQUEST_BYTES, backlog=MAX_CONNECTIONS, **tls
            )
        except OSError as error:
            raise ConfigError(f"the health door cannot listen on {address}: {error.strerror}") from error
        return Address(address.host, self._http.sockets[0].getsockname()[1])

    async def open_grpc(self, address: Address) -> Address:
        server = _health_server(self._health)
        try:
            add_port = server.add_insecure_port if self._security is None else self._security.add_port(server)
            port = add_port(str(address))
        except RuntimeError as error:
            raise ConfigError(f"the health door cannot listen for gRPC on {address}") from error
        self._grpc = server
        await server.start()
        self._looking = asyncio.create_task(self._look_forever(), name="health-door")
        return Address(address.host, int(port))

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._http is not None:
            self._http.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._grpc is not None:
            await self._grpc.stop(0.0)

    async def problem(self) -> str:
        try:
            return await asyncio.wait_for(self._problem(), PROBLEM_S)
        except TimeoutError:
            return f"it could not be found out within {PROBLEM_S:g} s"
        except PenstockError as error:
            return error.message
        except Exception:
            log.exception("health_unknown")
            return "it could not be found out; the log says why"

    async def _look_forever(self) -> None:
        was_ready = None
        while True:
            problem = await self.problem()
            if was_ready is not (not problem):
                was_ready = not problem
                log.info("readiness", ready=was_ready, why=problem)
                await self._health.set("", SERVING if was_ready else NOT_SERVING)
            await asyncio.sleep(LOOK_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            answer = await self._answer(reader, writer.transport)
            writer.write(_encoded(answer))
            if writer.can_write_eof():
                writer.write_eof()
            await asyncio.wait_for(_taken(reader, writer), ANSWER_S)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # it left, or does not take its answer
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, connection: asyncio.BaseTransport) -> Answer:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
            method, path, headers = _parse(head)
        except asyncio.LimitOverrunError:
            return _refused(431, f"the headers are over {MAX_REQUEST_BYTES} bytes")
        except TimeoutError:
            return _refused(408, f"the headers were not whole after {REQUEST_S:g} seconds")
        except (asyncio.IncompleteReadError, ValueError):
            return _refused(400, "this is not a request of HTTP/1.1")
        if refusal := self._refusal(headers, method):
            return _refused(421, refusal.message)
        if method not in ("GET", "HEAD"):
            return _refused(405, "only GET is answered here")
        try:
            answer = await self._found(path, headers, connection)
        except Exception:
            log.exception("health_door_failed", path=path[:100])
            answer = _refused(500, BUG)
        return answer if method == "GET" else answer._replace(body=b"")

    async def _found(self, path: str, headers: Headers, connection: asyncio.BaseTransport) -> Answer:
        match path:
            case "/healthz" | "/livez":
                return _json(200, {"status": "alive"})
            case "/readyz":
                problem = await self.problem()
                if problem:
                    return _json(503, {"status": "not ready", "reason": problem})
                return _json(200, {"status": "ready"})
            case "/metrics":
                if refusal := self._guarding(headers, connection):
                    return _refused(401 if isinstance(refusal, Unauthenticated) else 403, refusal.message)
                registry = self._registry()
                text = await asyncio.to_thread(as_text, registry)  # reads a file for each process and metric
                return Answer(200, text, CONTENT_TYPE_LATEST)
            case _:
                return _refused(404, "there are /healthz, /readyz and /metrics")


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _health_server(health: health_aio.HealthServicer) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", SMALL_MESSAGE_BYTES),
            ("grpc.max_metadata_size", MAX_REQUEST_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_REQUEST_BYTES),
            ("grpc.max_concurrent_streams", MAX_CONNECTIONS),
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", int(1000 * REQUEST_S)),
        ]
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


async def _taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the client has closed: what is closed before its last bytes were read is reset, with the answer."""
    await writer.drain()
    with suppress(asyncio.LimitOverrunError):
        while await reader.read(MAX_REQUEST_BYTES):
            pass


def _parse(head: bytes) -> tuple[str, str, Headers]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, protocol = first.split(" ")
    if not protocol.startswith("HTTP/1."):
        raise ValueError(protocol)
    headers = [line.partition(":") for line in lines if line]
    return method, target.partition("?")[0], [(n.strip().lower().encode(), v.strip().encode()) for n, _, v in headers]


def _refused(status: int, message: str) -> Answer:
    return _json(status, {"error": message})


def _json(status: int, said: Mapping[str, str]) -> Answer:
    return Answer(status, orjson.dumps(said))


def _encoded(answer: Answer) -> bytes:
    challenge = (
        'www-authenticate: Basic realm="penstock"\r\n' if answer.status == 401 else ""
    )  # a browser asks its user
    head = (
        f"HTTP/1.1 {answer.status} {REASONS[answer.status]}\r\ncontent-type: {answer.media_type}\r\n"
        f"content-length: {len(answer.body)}\r\n{challenge}connection: close\r\n\r\n"
    )
    return head.encode() + answer.body
