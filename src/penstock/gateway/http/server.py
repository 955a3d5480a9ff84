"""The gateway's HTTP server: uvicorn with our protocols."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn

from penstock.core.config import Limits
from penstock.gateway.grpc.server import ENVELOPE_BYTES
from penstock.gateway.http.app import HttpApp
from penstock.gateway.http.connection import InferProtocol
from penstock.gateway.streams.websocket_protocol import StreamProtocol


def http_server(app: HttpApp, limits: Limits) -> uvicorn.Server:
    config = uvicorn.Config(
        cast("uvicorn._types.ASGIApplication", app),
        http=cast(type[asyncio.Protocol], partial(InferProtocol, app.infer, app.doorman)),
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=2048,
        timeout_keep_alive=75,
        ws=StreamProtocol,
        ws_max_size=limits.max_message_bytes + ENVELOPE_BYTES,
        ws_per_message_deflate=False,
    )
    return _HttpServer(config)


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are not this door's: what is inside ends before it closes."""
        yield
