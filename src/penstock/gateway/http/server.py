"""HTTP servers: uvicorn with our protocols; a gateway's, and the smaller doors of other roles."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.gateway import statuses
from penstock.gateway.grpc.oip_wire import ENVELOPE_BYTES
from penstock.gateway.http.bounded import BoundedProtocol, BoundedServer
from penstock.gateway.http.handshake import secured
from penstock.gateway.turnstile import Turnstile, http_connections, widen_files
from penstock.serving.admission import Admission
from penstock.wire.credentials.certificates import Certificates, ClientAuth

if TYPE_CHECKING:
    from penstock.gateway.http.app import HttpApp

log = structlog.get_logger()
MAX_MESSAGE_BYTES = 64 * 1024  # that one who only listens to a WebSocket may send
CLOSE_S = 2
Protocol = Callable[..., asyncio.Protocol]


def http_server(app: "HttpApp", limits: Limits, admission: Admission, certificates: Certificates) -> uvicorn.Server:
    from penstock.gateway.http.connection import InferProtocol
    from penstock.gateway.streams.websocket_protocol import StreamProtocol

    turnstile = Turnstile(limits, admission, app.infer.turned_away, http_connections(limits, widen_files()))
    protocol = secured(partial(InferProtocol, app.infer, app.doorman, turnstile), turnstile, certificates)
    websockets = {"ws": partial(StreamProtocol, turnstile), "ws_max_size": limits.max_message_bytes + ENVELOPE_BYTES}
    return _server(cast(ASGIApp, app), protocol, backlog=2048, date_header=False, **websockets)


def serve_door(
    app: ASGIApp,
    opened: socket.socket,
    limits: Limits,
    max_connections: int,
    certificates: Certificates,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    websocket: Callable[..., Any] | None = None,
    client_auth: ClientAuth | None = None,
) -> Callable[[], Awaitable[None]]:
    """Returns what closes it. Without `websocket` there are none."""
    turnstile = Turnstile(limits, Admission(limits), _turned_away, max_connections)
    options: dict[str, Any] = {"ws": "none"}
    if websocket is not None:
        options = {"ws": partial(websocket, turnstile), "ws_max_size": MAX_MESSAGE_BYTES}
    behind = secured(partial(protocol, turnstile), turnstile, certificates, client_auth)
    server = _server(app, behind, timeout_graceful_shutdown=CLOSE_S, **options)
    serving = asyncio.create_task(server.serve(sockets=[opened]), name="http-door")

    async def close() -> None:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * CLOSE_S)

    return close


def _server(app: ASGIApp, protocol: Protocol, **options: Any) -> BoundedServer:
    config = uvicorn.Config(
        cast("uvicorn._types.ASGIApplication", app),
        http=cast(type[asyncio.Protocol], protocol),
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws_per_message_deflate=False,
        **options,
    )
    return BoundedServer(config)


def _turned_away(error: PenstockError) -> None:
    log.info("turned_away", code=error.code, error=statuses.told(error))
