"""The gateway's HTTP server: uvicorn with our protocols."""

import asyncio
from functools import partial
from typing import cast

import uvicorn

from penstock.core.config import Limits
from penstock.gateway.grpc.oip_wire import ENVELOPE_BYTES
from penstock.gateway.http.app import HttpApp
from penstock.gateway.http.bounded import BoundedServer
from penstock.gateway.http.connection import InferProtocol
from penstock.gateway.http.handshake import secured
from penstock.gateway.streams.websocket_protocol import StreamProtocol
from penstock.gateway.turnstile import Turnstile, http_connections, widen_files
from penstock.serving.admission import Admission
from penstock.wire.credentials.certificates import Certificates


def http_server(app: HttpApp, limits: Limits, admission: Admission, certificates: Certificates) -> uvicorn.Server:
    turnstile = Turnstile(limits, admission, app.infer.turned_away, http_connections(limits, widen_files()))
    protocol = partial(InferProtocol, app.infer, app.doorman, turnstile)
    config = uvicorn.Config(
        cast("uvicorn._types.ASGIApplication", app),
        http=cast(type[asyncio.Protocol], secured(protocol, turnstile, certificates)),
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=2048,
        ws=cast(type[asyncio.Protocol], partial(StreamProtocol, turnstile)),
        ws_max_size=limits.max_message_bytes + ENVELOPE_BYTES,
        ws_per_message_deflate=False,
    )
    return BoundedServer(config)
