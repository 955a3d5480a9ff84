"""The gateway's HTTP server: uvicorn with our protocols."""

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, cast

import uvicorn

from penstock.core.config import Limits
from penstock.gateway.grpc.oip_wire import ENVELOPE_BYTES
from penstock.gateway.http.app import HttpApp
from penstock.gateway.http.connection import InferProtocol
from penstock.gateway.streams.websocket_protocol import StreamProtocol
from penstock.gateway.turnstile import Turnstile, http_connections, widen_files
from penstock.serving.admission import Admission


def http_server(app: HttpApp, limits: Limits, admission: Admission) -> uvicorn.Server:
    turnstile = Turnstile(limits, admission, app.infer.turned_away, http_connections(limits, widen_files()))
    config = uvicorn.Config(
        cast("uvicorn._types.ASGIApplication", app),
        http=cast(type[asyncio.Protocol], partial(InferProtocol, app.infer, app.doorman, turnstile)),
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
    return _HttpServer(config)


class _HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._unseen: Iterator[Any] = iter(())  # connections that are looked at in this second
        self._together = 0

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; every connection is looked at once a second, some at each tick."""
        if counter % 10 == 0:
            connections = list(self.server_state.connections)
            self._unseen, self._together = iter(connections), len(connections) // 9 + 1
        now = asyncio.get_running_loop().time()
        for connection in islice(self._unseen, self._together):
            connection.look(now)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are not this door's: what is inside ends before it closes."""
        yield
