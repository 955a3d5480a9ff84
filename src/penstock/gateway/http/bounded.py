"""uvicorn's HTTP connection within limits: on headers, on what is sent ahead, on time, on what is held for its client.

Clocks are looked at once a second for all connections: a timer for each request would cost more than its limits.
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
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.core.errors import HeadersTooLarge, InvalidRequest, Overloaded, PenstockError, TooSlow
from penstock.gateway import statuses
from penstock.gateway.http.doorman import CERTIFICATE
from penstock.gateway.turnstile import Outlet, SlowConnection, Turnstile, unsent_bytes
from penstock.wire.credentials.names import names_of_transport

log = structlog.get_logger()
PIPELINED = 128  # requests that a client may send ahead of an answer
LINGER_S = 2.0  # what is still coming when a request is refused is read and dropped, so that the refusal is heard
LINGER_BYTES = 1024 * 1024  # of it, where it is not a body: a client that sends more does not listen
UNCOUNTED_BYTES = 16 * 1024  # of a body: it takes a million of such to matter, and there are not as many connections


class Phase(Enum):
    IDLE = auto()  # between requests
    HEADERS = auto()  # a request has begun
    BODY = auto()
    SERVING = auto()  # all of it is here
    REFUSED = auto()  # what comes is dropped


class _RefusedInParser(Exception):
    """Ends the parser's work on what follows."""


class BoundedProtocol(SlowConnection, HttpToolsProtocol):
    def __init__(self, turnstile: Turnstile, **options: Any) -> None:
        super().__init__(**options)
        self._turnstile = turnstile
        self._limits = turnstile.limits
        self._address: str | None = None  # once it is let in
        self._certificate: tuple[str, ...] = ()
        self._phase = Phase.IDLE
        self._begun = self._heard = self.loop.time()
        self._is_bulky = False  # what is being parsed may hold more than headers may have
        self._header_bytes = 0  # that came before what is being parsed
        self._body_bytes = 0
        self._dropped_bytes = self._linger_bytes = 0  # once it is refused
        self._framing_bytes = self._trailers = 0  # of a body that comes in chunks: all that is not body
        self._outlet = Outlet(self.loop.time())
        self._refusal: PenstockError | None = None  # that is told once what came before it is answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if certificate := names_of_transport(transport):
            self._certificate = certificate
            self.app_state = {**self.app_state, CERTIFICATE: certificate}  # a WebSocket's, too, should it become one
        address = self.client[0] if self.client else ""
        if self._turnstile.let_in(address):
            self._address = address
        else:
            error = Overloaded("too many connections are open already, in all or from your address; try again later")
            self._turnstile.turned_away(error)
            self._phase = Phase.REFUSED
            transport.write(self._told(error))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.REFUSED:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > self._linger_bytes:
                self.transport.abort()
            return
        self._heard = self.loop.time()
        size = len(data)
        phase, headers, body_bytes = self._phase, self.headers, self._body_bytes
        self._is_bulky = size > self._limits.max_header_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            return
        except httptools.HttpParserError:  # or it was refused while it was parsed
            self.refuse(InvalidRequest("this is not a request of HTTP/1.1"))
            return
        if self._phase is Phase.HEADERS:
            if phase is Phase.HEADERS and headers is self.headers:
                self._header_bytes += size
                if self._header_bytes > self._limits.max_header_bytes:
                    self.refuse(self._headers_too_large())
        elif self._phase is Phase.BODY:
            is_body_alone = phase is Phase.BODY and headers is self.headers
            self.still_coming(size - (self._body_bytes - body_bytes) if is_body_alone else 0)

    def handle_websocket_upgrade(self) -> None:
        self._leave()  # the WebSocket is let in itself
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._phase = Phase.HEADERS
        self._begun = self._heard
        self._header_bytes = self._body_bytes = self._framing_bytes = self._trailers = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's; but what follows a body is no header, whatever it is called."""
        if self._phase is Phase.BODY:
            self._trailers += 1
        else:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._phase = Phase.BODY
        if len(self.headers) > self._limits.max_headers or (
            (self._is_bulky or self._header_bytes) and self._measured() > self._limits.max_header_bytes
        ):
            self._refuse_in_parser(self._headers_too_large())
        if len(self.pipeline) >= PIPELINED:
            self._refuse_in_parser(Overloaded(f"{PIPELINED} requests wait on this connection; wait for answers"))
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self._refuse_in_parser(InvalidRequest("of transfer encodings this server knows 'chunked' alone"))
        url, headers, expect = self.url, self._headers_of_target(), self.expect_100_continue
        super().on_message_begin()
        self.headers.extend(headers)
        self.url, self.expect_100_continue = url, expect
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            self.cycle = None  # type: ignore[assignment]  # not what was answered before on this connection

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self.cycle.response_complete and not self.hold(len(body)):
            raise _RefusedInParser
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.came_whole()

    def still_coming(self, framing_bytes: int) -> None:
        """After each part of a body that is not whole: what is around its chunks may not be more than what is in them,
        and its trailers as large as headers."""
        if framing_bytes:
            self._framing_bytes += framing_bytes
            if self._framing_bytes > self._limits.max_header_bytes + self._body_bytes:
                self.refuse(
                    InvalidRequest("its chunks are smaller than what is around them, or its trailers too large")
                )
            elif self._trailers > self._limits.max_headers:
                self.refuse(self._headers_too_large())

    def hold(self, size: int) -> bool:
        """Counts a part of a body; who has been sending longest may have to go. Returns whether it may stay."""
        if self._body_bytes > UNCOUNTED_BYTES:
            for connection in self._turnstile.coming.add(self, size):
                assert isinstance(connection, BoundedProtocol)
                connection.refuse(
                    Overloaded("too many bytes of requests that are not whole are held already; try again later")
                )
        return self._phase is not Phase.REFUSED

    def came_whole(self) -> None:
        """The request is here; from now on its size counts as what is inside."""
        if self._body_bytes > UNCOUNTED_BYTES:
            self._turnstile.coming.drop(self)
        cycle: Any = self.cycle
        self._phase = Phase.IDLE if cycle is not None and cycle.response_complete else Phase.SERVING

    def on_response_complete(self) -> None:
        """As uvicorn's, less its timer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self._refusal is None:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._say(self._refusal)
        elif self._phase is Phase.SERVING:
            self._phase = Phase.IDLE
            self._heard = self.loop.time()
        elif self._phase is Phase.BODY:
            self._turnstile.coming.drop(self)  # the rest is not kept

    def look(self, now: float) -> None:
        """Now and then: ends what takes too long."""
        limits, phase = self._limits, self._phase
        if self._outlet.is_stuck(unsent_bytes(self.transport), now, limits.answer_timeout_s) or (
            phase is Phase.REFUSED and self._refusal is None and now - self._begun > LINGER_S
        ):
            self.transport.abort()
        elif phase is Phase.IDLE:
            if now - self._heard > limits.idle_timeout_s:
                self.transport.close()
        elif phase is Phase.HEADERS:
            if now - self._begun > limits.header_timeout_s and not self.flow.read_paused:
                self.refuse(TooSlow(f"the headers were not whole after {limits.header_timeout_s:g} seconds"))
        elif phase is Phase.BODY and not self.flow.read_paused:
            if now - self._heard > limits.body_timeout_s:
                self.refuse(TooSlow(f"the body stopped coming for {limits.body_timeout_s:g} seconds"))
            elif now - self._begun > limits.message_timeout_s:
                self.refuse(TooSlow(f"the request was not whole after {limits.message_timeout_s:g} seconds"))

    def refuse(self, error: PenstockError) -> None:
        """Says why, once all that came before it is answered, and reads no more."""
        if self._phase is Phase.REFUSED or self.transport.is_closing():
            return
        cycle: Any = self.cycle
        has_cycle = self._phase is Phase.BODY and cycle is not None  # what is refused; else it is that before it
        is_first = not self.pipeline if has_cycle else cycle is None or cycle.response_complete
        self._linger_bytes = self._limits.max_message_bytes if has_cycle else LINGER_BYTES
        self._phase = Phase.REFUSED
        self._turnstile.coming.drop(self)
        self._turnstile.turned_away(error)
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
            self._say(error)

    def _say(self, error: PenstockError) -> None:
        self._refusal = None
        self._begun = self.loop.time()
        self.transport.write(self._told(error))
        if self.transport.can_write_eof():  # TLS has no half that could be closed: the answer says that it is the last
            self.transport.write_eof()
        self.flow.resume_reading()

    def _refuse_in_parser(self, error: PenstockError) -> None:
        self._phase = Phase.HEADERS  # the request before is the last that has a cycle
        self.refuse(error)
        raise _RefusedInParser

    def _headers_of_target(self) -> list[tuple[bytes, bytes]]:
        """A request whose first line names a host is for that one, whatever its headers say."""
        if self.url.startswith(b"/") or b"://" not in self.url:
            return self.headers
        host = self.url.split(b"/", 3)[2]
        return [(b"host", host), *((name, value) for name, value in self.headers if name != b"host")]

    def _headers_too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(
            f"the headers are over limits.max_header_bytes ({limits.max_header_bytes}) or limits.max_headers "
            f"({limits.max_headers}): send fewer and shorter ones"
        )

    def _measured(self) -> int:
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])

    def _leave(self) -> None:
        self._turnstile.coming.drop(self)
        self._turnstile.unsent.drop(self)
        if self._address is not None:
            self._turnstile.left(self._address)
            self._address = None

    def body_of(self, error: PenstockError) -> object:
        """What is said of it, as JSON."""
        return {"error": statuses.told(error)}

    def _told(self, error: PenstockError) -> bytes:
        body = orjson.dumps(self.body_of(error))
        lines = "".join(f"{name}: {value}\r\n" for name, value in statuses.headers(error).items())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{lines}\r\n"
        return STATUS_LINE[statuses.http_code(error)] + head.encode() + body


class BoundedServer(uvicorn.Server):
    """Looks at its connections, which are bounded ones."""

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
            try:
                connection.look(now)
            except Exception:  # else no other connection would be looked at any more
                log.exception("bug", where="http connection")
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are not this door's: what is inside ends before it closes."""
        yield
