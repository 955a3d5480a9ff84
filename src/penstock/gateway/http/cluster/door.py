"""A manager's HTTP door: uvicorn with our protocols, whatever the application behind it is."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.gateway import statuses
from penstock.gateway.http.bounded import BoundedProtocol, BoundedServer, Phase
from penstock.gateway.http.handshake import secured
from penstock.gateway.turnstile import Turnstile
from penstock.serving.admission import Admission
from penstock.wire.credentials.certificates import Certificates

log = structlog.get_logger()
MAX_CONNECTIONS = 256
MAX_MESSAGE_BYTES = 64 * 1024  # that one who only listens may send
CLOSE_S = 2


class ManagerProtocol(BoundedProtocol):
    """A body is not held, but written as it comes: it may have any size, and take as long as it moves."""

    def hold(self, size: int) -> bool:
        return self._phase is not Phase.REFUSED

    def body_of(self, error: PenstockError) -> object:
        return {"error": {"code": error.code, "message": statuses.told(error)}}


def serve_manager_http(
    app: ASGIApp, opened: socket.socket, limits: Limits, certificates: Certificates
) -> Callable[[], Awaitable[None]]:
    """Returns what closes it."""
    limits = limits.model_copy(update={"message_timeout_s": inf})
    turnstile = Turnstile(limits, Admission(limits), _turned_away, MAX_CONNECTIONS)

    def websocket(**options: Any) -> asyncio.Protocol:
        from penstock.gateway.streams.websocket_protocol import StreamProtocol  # few ever watch

        return StreamProtocol(turnstile, **options)

    server = BoundedServer(
        uvicorn.Config(
            cast("uvicorn._types.ASGIApplication", app),
            http=cast(type[asyncio.Protocol], secured(partial(ManagerProtocol, turnstile), turnstile, certificates)),
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
            ws=cast(type[asyncio.Protocol], websocket),
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[opened]), name="manager-http-door")

    async def close() -> None:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * CLOSE_S)

    return close


def _turned_away(error: PenstockError) -> None:
    log.info("turned_away", code=error.code, error=statuses.told(error))
