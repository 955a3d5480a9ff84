"""HTTP servers: uvicorn with bounded connections."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.endpoints import statuses
from penstock.endpoints.connection_limits import ConnectionLimits
from penstock.endpoints.held_bytes import Transit
from penstock.endpoints.http.bounded_protocol import BoundedProtocol, BoundedServer
from penstock.endpoints.http.handshake import add_tls
from penstock.telemetry.repeated_log import RepeatedLog
from penstock.wire.credentials.certificates import Certificates, ClientAuth

MAX_MESSAGE_BYTES = 64 * 1024  # from a WebSocket client, which only receives here
CLOSE_S = 2
Protocol = Callable[..., asyncio.Protocol]


def serve_app(
    app: ASGIApp,
    listening: socket.socket,
    limits: Limits,
    max_connections: int,
    certificates: Certificates,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    websocket: Callable[..., Any] | None = None,
    client_auth: ClientAuth | None = None,
    is_behind_edge: bool = False,
) -> Callable[[], Awaitable[None]]:
    """Serve an application on an open socket, and return a function that closes the server.

    `websocket` makes the protocol of WebSockets; None: WebSockets are refused. `is_behind_edge`: the socket is a unix
    socket that only the edge uses.
    """
    rejected = partial(_log_rejected, RepeatedLog("connection_rejected"))
    connection_limits = ConnectionLimits(limits, Transit(limits), rejected, max_connections, is_behind_edge)
    options: dict[str, Any] = {"ws": "none"}
    if websocket is not None:
        options = {"ws": partial(websocket, connection_limits), "ws_max_size": MAX_MESSAGE_BYTES}
    factory: Protocol = partial(protocol, connection_limits)
    if not is_behind_edge:
        factory = add_tls(factory, connection_limits, certificates, client_auth)
    server = create_uvicorn_server(app, factory, timeout_graceful_shutdown=CLOSE_S, **options)
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="http-app")

    async def close() -> None:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * CLOSE_S)

    return close


def create_uvicorn_server(app: ASGIApp, protocol: Protocol, **options: Any) -> BoundedServer:
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


def _log_rejected(rejected: RepeatedLog, error: PenstockError) -> None:
    rejected.add(code=error.code, error=statuses.make_public_message(error))
