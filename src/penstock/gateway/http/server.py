"""The gateway's HTTP server: uvicorn with our protocols, on a port that gateways share."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.gateway.grpc.server import ENVELOPE_BYTES
from penstock.gateway.http.app import HttpApp
from penstock.gateway.http.connection import InferProtocol
from penstock.gateway.streams.websocket_protocol import StreamProtocol


def check_port(host: str, port: int, flag: str) -> None:
    """SO_REUSEPORT would let a second server share the port in silence, so look before it is opened so."""
    _bind(host, port, "listen", flag).close()


def open_http_socket(host: str, port: int) -> socket.socket:
    """Shared by the gateways of one machine through SO_REUSEPORT."""
    return _bind(host, port, "listen for HTTP", "--http-port", socket.SO_REUSEPORT)


def _bind(host: str, port: int, what: str, flag: str, *options: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    for option in (socket.SO_REUSEADDR, *options):
        opened.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise ConfigError(f"cannot {what} on {host}:{port}: {error.strerror}; choose another {flag}") from error
    return opened


def http_server(app: HttpApp, limits: Limits) -> uvicorn.Server:
    config = uvicorn.Config(
        cast("uvicorn._types.ASGIApplication", app),
        http=cast(type[asyncio.Protocol], partial(InferProtocol, app.infer)),
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
