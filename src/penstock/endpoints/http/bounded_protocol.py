"""uvicorn's HTTP connection with limits on headers, pipelined requests, times, and bytes held for the client.

One timer checks all connections once per second, because a timer per request would cost more than all other limits.
"""

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from itertools import islice
from typing import Any

import httptools
import orjson
import structlog
import uvicorn

from penstock.core.errors import HeadersTooLarge, InvalidRequest, Overloaded, PenstockError, TooSlow
from penstock.endpoints import statuses
from penstock.endpoints.connection_limits import MAX_UNCOUNTED_BYTES, ConnectionLimits, SendProgress, SlowConnection
from penstock.endpoints.edge_identity import CLIENT_HEADER, read_header_identity
from penstock.endpoints.http.http_guard import CERTIFICATE
from penstock.endpoints.uvicorn_internals import STATUS_LINE, HttpToolsProtocol
from penstock.wire.credentials.certificate_names import read_transport_names

log = structlog.get_logger()
MAX_PIPELINED = 128  # requests that a client may send ahead of an answer
LINGER_S = 2.0  # after a refusal, read and drop input for this time; otherwise the client might miss the refusal
LINGER_BYTES = (
    1024 * 1024
)  # a client that sends more input after a refusal is disconnected, except for the refused request's body


class Phase(Enum):
    IDLE = auto()  # between requests
    HEADERS = auto()  # a request has started
    BODY = auto()
    SERVING = auto()  # the request has arrived completely
    REFUSED = auto()  # further input is dropped


class _RefusedInParser(Exception):
    """Raised in a callback of the parser to stop parsing after a refusal."""


class BoundedProtocol(SlowConnection, HttpToolsProtocol):
    """An HTTP connection that refuses requests over the limits.

    It depends on private parts of uvicorn's `HttpToolsProtocol`; tests/unit/endpoints/http/test_library_internals.py
    fails if a new version changes them.
    """

    def __init__(self, connection_limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._connection_limits = connection_limits
        self._limits = connection_limits.limits
        self._address: str | None = None  # set once the connection is counted
        self._certificate: tuple[str, ...] = ()
        self._phase = Phase.IDLE
        self._started_at = self._received_at = self.loop.time()
        self._is_large_read = False  # the data being parsed is larger than limits.max_header_bytes
        self._header_bytes = 0  # received before the data being parsed
        self._body_bytes = 0
        self._dropped_bytes = self._linger_bytes = 0  # after a refusal
        self._framing_bytes = self._trailers = 0  # of a chunked body: bytes around its chunks, and trailing headers
        self._sending = SendProgress(self.loop.time())
        self._refusal: PenstockError | None = None  # sent after the answers of earlier requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if certificate := read_transport_names(transport):
            self._certificate = certificate
            self.app_state = {**self.app_state, CERTIFICATE: certificate}  # also passed on to a WebSocket
        address = self.client[0] if self.client else ""
        if self._connection_limits.try_open(address):
            self._address = address
        else:
            error = Overloaded("too many connections are open already, in all or from your address; try again later")
            self._connection_limits.on_rejected(error)
            self._phase = Phase.REFUSED
            transport.write(self._encode_refusal(error))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_counting()

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.REFUSED:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > self._linger_bytes:
                self.transport.abort()
            return
        self._received_at = self.loop.time()
        size = len(data)
        phase, headers, body_bytes = self._phase, self.headers, self._body_bytes
        self._is_large_read = size > self._limits.max_header_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            return
        except httptools.HttpParserError:  # also raised after a refusal in a callback; `refuse` then does nothing
            self.refuse(InvalidRequest("the request is not valid HTTP/1.1"))
            return
        if self._phase is Phase.HEADERS:
            if phase is Phase.HEADERS and headers is self.headers:
                self._header_bytes += size
                if self._header_bytes > self._limits.max_header_bytes:
                    self.refuse(self._create_headers_error())
        elif self._phase is Phase.BODY:
            is_body_alone = phase is Phase.BODY and headers is self.headers
            self.check_framing(size - (self._body_bytes - body_bytes) if is_body_alone else 0)

    def handle_websocket_upgrade(self) -> None:
        self._stop_counting()  # the WebSocket protocol counts the connection
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._phase = Phase.HEADERS
        self._started_at = self._received_at
        self._header_bytes = self._body_bytes = self._framing_bytes = self._trailers = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header as uvicorn does. Trailers, which follow a chunked body, are only counted."""
        if self._phase is Phase.BODY:
            self._trailers += 1
        else:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def read_edge_identity(self) -> None:
        """If the edge opened this connection, read the client's identity from the headers that the edge adds."""
        if self._connection_limits.is_behind_edge:
            found = read_header_identity(self.headers)
            self.client = found.client
            self._certificate = found.certificate
            self.app_state = {**self.app_state, CERTIFICATE: found.certificate, CLIENT_HEADER: found.client}

    def on_headers_complete(self) -> None:
        self.read_edge_identity()
        self._phase = Phase.BODY
        if len(self.headers) > self._limits.max_headers or (
            (self._is_large_read or self._header_bytes) and self._count_header_bytes() > self._limits.max_header_bytes
        ):
            self._refuse_in_parser(self._create_headers_error())
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse_in_parser(
                Overloaded(f"{MAX_PIPELINED} requests already wait on this connection: wait for their answers")
            )
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self._refuse_in_parser(InvalidRequest("unsupported transfer-encoding: only 'chunked' is supported"))
        url, headers, expect = self.url, self._apply_target_host(), self.expect_100_continue
        super().on_message_begin()
        self.headers.extend(headers)
        self.url, self.expect_100_continue = url, expect
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            self.cycle = None  # type: ignore[assignment]  # otherwise the previous request's cycle would remain

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self.cycle.response_complete and not self.hold_body(len(body)):
            raise _RefusedInParser
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.complete_request()

    def check_framing(self, framing_bytes: int) -> None:
        """Check a chunked body after each part; `framing_bytes` are the part's bytes outside the chunks.

        Refuse the request if more bytes are outside the chunks than in them, or if trailers exceed the header limits.
        """
        if framing_bytes:
            self._framing_bytes += framing_bytes
            if self._framing_bytes > self._limits.max_header_bytes + self._body_bytes:
                self.refuse(
                    InvalidRequest("the body's chunks are too small, or its trailers too large: send larger chunks")
                )
            elif self._trailers > self._limits.max_headers:
                self.refuse(self._create_headers_error())

    def hold_body(self, size: int) -> bool:
        """Count a part of a body. If too many bytes are held, refuse the bodies that are held longest.

        Return whether this connection may continue.
        """
        if self._body_bytes > MAX_UNCOUNTED_BYTES:
            self.hold_incoming(size)
        return self._phase is not Phase.REFUSED

    def complete_request(self) -> None:
        """Stop counting the body as incoming, because admission counts it from now on."""
        if self._body_bytes > MAX_UNCOUNTED_BYTES:
            self._connection_limits.incoming.drop(self)
        cycle: Any = self.cycle
        self._phase = Phase.IDLE if cycle is not None and cycle.response_complete else Phase.SERVING

    def on_response_complete(self) -> None:
        """Continue with the next request as uvicorn does, but without its keep-alive timer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self._refusal is None:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self._phase is Phase.SERVING:
            self._phase = Phase.IDLE
            self._received_at = self.loop.time()
        elif self._phase is Phase.BODY:
            self._connection_limits.incoming.drop(self)  # the rest of the body is not stored

    def check_timeouts(self, now: float) -> None:
        """Refuse or close the connection if it exceeds a time limit; called about once per second."""
        limits, phase = self._limits, self._phase
        if self._sending.is_stuck(self.transport.get_write_buffer_size(), now, limits.answer_timeout_s) or (
            phase is Phase.REFUSED and self._refusal is None and now - self._started_at > LINGER_S
        ):
            self.transport.abort()
        elif phase is Phase.IDLE:
            if now - self._received_at > limits.idle_timeout_s:
                self.transport.close()
        elif phase is Phase.HEADERS:
            if now - self._started_at > limits.header_timeout_s and not self.flow.read_paused:
                self.refuse(TooSlow(f"the headers were not complete after {limits.header_timeout_s:g} seconds"))
        elif phase is Phase.BODY and not self.flow.read_paused:
            if now - self._received_at > limits.body_timeout_s:
                self.refuse(TooSlow(f"no part of the body arrived for {limits.body_timeout_s:g} seconds"))
            elif now - self._started_at > limits.message_timeout_s:
                self.refuse(TooSlow(f"the request was not complete after {limits.message_timeout_s:g} seconds"))

    def refuse(self, error: PenstockError) -> None:
        """Read no more requests, and send the error after the answers of earlier requests."""
        if self._phase is Phase.REFUSED or self.transport.is_closing():
            return
        cycle: Any = self.cycle
        has_cycle = self._phase is Phase.BODY and cycle is not None  # otherwise `cycle` belongs to an earlier request
        is_first = not self.pipeline if has_cycle else cycle is None or cycle.response_complete
        self._linger_bytes = self._limits.max_message_bytes if has_cycle else LINGER_BYTES
        self._phase = Phase.REFUSED
        self._connection_limits.incoming.drop(self)
        self._connection_limits.on_rejected(error)
        if has_cycle:
            cycle.disconnected = True
            cycle.message_event.set()
        if not is_first:
            if has_cycle:
                self.pipeline.popleft()
            self._refusal = error
            self.flow.pause_reading()
        elif has_cycle and (cycle.response_complete or getattr(cycle, "response_started", False)):
            self.transport.close()
        else:
            self._send_refusal(error)

    def _send_refusal(self, error: PenstockError) -> None:
        self._refusal = None
        self._started_at = self.loop.time()
        self.transport.write(self._encode_refusal(error))
        if self.transport.can_write_eof():  # False for TLS, where `connection: close` marks the end
            self.transport.write_eof()
        self.flow.resume_reading()

    def _refuse_in_parser(self, error: PenstockError) -> None:
        self._phase = Phase.HEADERS  # `cycle` still belongs to the previous request
        self.refuse(error)
        raise _RefusedInParser

    def _apply_target_host(self) -> list[tuple[bytes, bytes]]:
        """Return the headers. If the request line names a host, it replaces the header `Host`."""
        if self.url.startswith(b"/") or b"://" not in self.url:
            return self.headers
        host = self.url.split(b"/", 3)[2]
        return [(b"host", host), *((name, value) for name, value in self.headers if name != b"host")]

    def _create_headers_error(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(
            f"the headers exceed limits.max_header_bytes ({limits.max_header_bytes}) or limits.max_headers "
            f"({limits.max_headers}): send fewer and shorter ones"
        )

    def _count_header_bytes(self) -> int:
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])

    def _stop_counting(self) -> None:
        self._connection_limits.incoming.drop(self)
        self._connection_limits.unsent.drop(self)
        if self._address is not None:
            self._connection_limits.count_close(self._address)
            self._address = None

    def make_error_body(self, error: PenstockError) -> object:
        """Return the JSON body of a refusal."""
        return {"error": statuses.make_public_message(error)}

    def _encode_refusal(self, error: PenstockError) -> bytes:
        body = orjson.dumps(self.make_error_body(error))
        lines = "".join(f"{name}: {value}\r\n" for name, value in statuses.make_headers(error).items())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{lines}\r\n"
        return STATUS_LINE[statuses.get_http_code(error)] + head.encode() + body


class BoundedServer(uvicorn.Server):
    """A uvicorn server that checks the limits of its connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._unchecked: Iterator[Any] = iter(())  # connections still to be checked in this second
        self._per_tick = 0

    async def on_tick(self, counter: int) -> bool:
        """Check a tenth of the connections at each tick: with ten ticks per second, each connection once per second."""
        if counter % 10 == 0:
            connections = list(self.server_state.connections)
            self._unchecked, self._per_tick = iter(connections), len(connections) // 9 + 1
        now = asyncio.get_running_loop().time()
        for connection in islice(self._unchecked, self._per_tick):
            try:
                connection.check_timeouts(now)
            except Exception:  # the other connections must still be checked
                log.exception("bug", where="http connection")
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signal handling to the process, which ends running requests before it closes the server."""
        yield
