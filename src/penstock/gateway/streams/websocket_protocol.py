"""uvicorn's WebSocket connection, for peers that are read only as fast as they take their answers."""

import asyncio
from codecs import getincrementaldecoder
from functools import partial
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from penstock.gateway.streams.websocket import LEAVING
from penstock.gateway.streams.websocket_codec import Utf8
from penstock.gateway.turnstile import Outlet, SlowConnection, Turnstile, unsent_bytes

NOT_TEXT = 1007
PIECE_BYTES = 64 * 1024
STEP_BYTES = 4096  # parsed at once: as many as seven hundred frames
FRAGMENTS = 64  # that a message may have, however small; those beyond must have FRAGMENT_BYTES each
FRAGMENT_BYTES = 1024
CONTROLS = 64  # pings and pongs that a peer may send in a second


class StreamProtocol(SlowConnection, WebSocketsSansIOProtocol):
    def __init__(self, turnstile: Turnstile, **options: Any) -> None:
        super().__init__(**options)
        setattr(self.conn, "reject", partial(_reject, self.conn.reject))  # noqa: B010 - its own answers are no JSON
        self._turnstile = turnstile
        self._address: str | None = None  # once it is let in
        self._heard_at = 0.0
        self._outlet = Outlet(self.loop.time())
        self._unparsed = b""  # while what was parsed waits to be taken
        self._step_bytes = STEP_BYTES
        self._fragment_bytes = 0
        self._controls = 0
        self._controls_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if self._turnstile.let_in(address):
            self._address = address

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed = b""
        self._turnstile.unsent.drop(self)
        if self._address is not None:
            self._turnstile.left(self._address)
            self._address = None

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()

    def _parse(self) -> None:
        """Step by step: what a peer says in a few bytes may take long to read. Goes on when a message is taken."""
        while self._unparsed and not self.read_paused and not self.transport.is_closing():
            step, self._unparsed = self._unparsed[: self._step_bytes], self._unparsed[self._step_bytes :]
            super().data_received(step)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:  # uvicorn would not answer
                self.transport.write(_no_handshake(self.conn.handshake_exc))
                self.transport.close()

    async def receive(self) -> Any:
        message = await super().receive()
        if self._unparsed:
            self._parse()
        return message

    def handle_events(self) -> None:
        """Large frames are parsed in large steps."""
        is_busy = len(self.conn.events) > 1
        self._step_bytes = STEP_BYTES if is_busy else min(2 * self._step_bytes, 256 * 1024)
        super().handle_events()

    def handle_cont(self, event: Frame) -> None:
        self._fragment_bytes += len(event.data)
        count = len(self.frames)
        if count > FRAGMENTS and self._fragment_bytes < (count - FRAGMENTS) * FRAGMENT_BYTES:
            self._fail(f"a message may have {FRAGMENTS} fragments, and more only of {FRAGMENT_BYTES} bytes each")
        else:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._may_control():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._may_control():
            super().handle_pong(event)

    def _may_control(self) -> bool:
        if self._heard_at - self._controls_since > 1.0:
            self._controls, self._controls_since = 0, self._heard_at
        self._controls += 1
        if self._controls > CONTROLS or not self.writable.is_set():
            self._fail(f"{CONTROLS} pings and pongs in a second are enough, and the answers must be read")
            return False
        return True

    def _fail(self, reason: str) -> None:
        if self.transport.is_closing():
            return
        self.frames = []
        self.conn.fail(CloseCode.POLICY_VIOLATION, reason)
        self.handle_parser_exception()

    def keepalive_timeout(self) -> None:
        """A pong waits behind the messages that are not read while the window is full: that is no dead peer."""
        patience_s = self.ping_timeout or 0.0
        if self.read_paused or self.loop.time() - self._heard_at < patience_s:
            self.pong_timer = self.loop.call_later(patience_s, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def send_receive_event_to_app(self) -> None:
        self._fragment_bytes = 0
        if self.curr_msg_data_type == "text":
            self.frames = [Utf8(b"".join(self.frames))]
            if not _is_text(self.frames[0]):
                self.frames = []
                self.conn.fail(NOT_TEXT, "a text message must be UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # refused, with an answer: else uvicorn logs that none was given

    def look(self, now: float) -> None:
        """Now and then."""
        patience_s = self._turnstile.limits.answer_timeout_s
        if self._outlet.is_stuck(unsent_bytes(self.transport), now, patience_s):
            self.transport.abort()

    def shutdown(self) -> None:
        """Tells the edge, which answers what is inside and then closes."""
        if self.transport.is_closing():
            return
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
            return
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.receive", "text": LEAVING})

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """What the peer does not read would keep the closed connection open for ever."""
        super().on_task_complete(task)
        self.loop.call_later(self.close_timeout, self.transport.abort)


def _reject(reject: Any, status: Any, text: str) -> Any:
    response = reject(status, orjson.dumps({"error": text.strip()}).decode())
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    return response


def _no_handshake(why: Exception) -> bytes:
    body = orjson.dumps({"error": f"this is not the handshake of a WebSocket: {str(why)[:200]}"})
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINE[400] + head + body


def _is_text(data: bytes) -> bool:
    """Piece by piece: nobody wants the text itself."""
    if data.isascii():
        return True
    decoder = getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), PIECE_BYTES):
            decoder.decode(data[start : start + PIECE_BYTES])
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        return False
    return True
