"""uvicorn's WebSocket connection with limits. Messages are read only as fast as the client reads its answers."""

import asyncio
from codecs import getincrementaldecoder
from functools import partial
from typing import Any

import orjson
from websockets.frames import CloseCode, Frame

from penstock.core.errors import PenstockError
from penstock.endpoints.connection_limits import MAX_UNCOUNTED_BYTES, ConnectionLimits, SendProgress, SlowConnection
from penstock.endpoints.edge_identity import CLIENT_HEADER
from penstock.endpoints.uvicorn_internals import STATUS_LINE, WebSocketsSansIOProtocol

GOING_AWAY = 1001
NOT_TEXT = 1007
NOT_ADMITTED = 1008
MAX_REASON_CHARS = 100  # of the reason in a close frame
PIECE_BYTES = 64 * 1024
STEP_BYTES = 4096  # parsed at once, because this may already hold 700 frames
MAX_FREE_FRAGMENTS = (
    64  # a message may have this many fragments of any size; with more, they must average FRAGMENT_BYTES
)
MIN_FRAGMENT_BYTES = 1024
MAX_CONTROL_FRAMES = 64  # pings and pongs per second from one peer


class _ShutdownMarker(str):
    """The type of the marker SHUTTING_DOWN, which is compared by identity (`is`)."""


SHUTTING_DOWN = _ShutdownMarker()  # received in place of a message when the server shuts down


class Utf8(bytes):
    """Text as UTF-8 bytes. A `str` may take four times the memory, and the JSON parser reads bytes anyway."""

    __slots__ = ()

    def encode(self) -> bytes:  # uvicorn calls this on text to be sent
        return self

    def decode(self, *_: object) -> "Utf8":  # type: ignore[override]  # uvicorn calls this on received text
        return self


class StreamProtocol(SlowConnection, WebSocketsSansIOProtocol):
    """A WebSocket connection within limits.

    It depends on private parts of uvicorn's `WebSocketsSansIOProtocol`;
    tests/unit/endpoints/http/test_library_internals.py fails if a new version changes them.
    """

    def __init__(self, connection_limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        setattr(self.conn, "reject", partial(_reject, self.conn.reject))  # noqa: B010 - to answer in JSON
        self._connection_limits = connection_limits
        self._address: str | None = None  # set once the connection is counted
        self._received_at = 0.0
        self._sending = SendProgress(self.loop.time())
        self._unparsed = b""  # received bytes, while parsed messages wait to be read
        self._incoming_bytes = 0  # received since the application took a message
        self._step_bytes = STEP_BYTES
        self._fragment_bytes = 0
        self._control_frames = 0
        self._controls_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.client = self.app_state.get(CLIENT_HEADER, self.client)  # behind the edge, the client that the edge names
        address = self.client[0] if self.client else ""
        if self._connection_limits.try_open(address):
            self._address = address

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed = b""
        self._connection_limits.incoming.drop(self)
        self._connection_limits.unsent.drop(self)
        if self._address is not None:
            self._connection_limits.count_close(self._address)
            self._address = None

    def data_received(self, data: bytes) -> None:
        self._received_at = self.loop.time()
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._incoming_bytes += len(data)
        if self._incoming_bytes > MAX_UNCOUNTED_BYTES:
            self.hold_incoming(len(data))
        self._parse()
        if not (self._unparsed or self.frames or self.conn.reader.buffer) and self.queue.empty():
            self._stop_counting_message()  # there were control frames only

    def _parse(self) -> None:
        """Parse in small steps, because a few bytes may hold many frames. Stop while a message waits to be read."""
        while self._unparsed and not self.read_paused and not self.transport.is_closing():
            step, self._unparsed = self._unparsed[: self._step_bytes], self._unparsed[self._step_bytes :]
            super().data_received(step)
            if (
                self.conn.handshake_exc is not None and not self.handshake_initiated
            ):  # uvicorn does not answer a bad handshake
                self.transport.write(_encode_handshake_error(self.conn.handshake_exc))
                self.transport.close()

    async def receive(self) -> Any:
        message = await super().receive()
        self._stop_counting_message()
        if self._unparsed:
            self._parse()
        return message

    def _stop_counting_message(self) -> None:
        """Stop counting the received bytes, because decoding and admission count the message from now on."""
        if self._incoming_bytes > MAX_UNCOUNTED_BYTES:
            self._connection_limits.incoming.drop(self)
        self._incoming_bytes = 0

    def handle_events(self) -> None:
        """Handle parsed frames; parse in larger steps if a step holds at most one frame."""
        is_busy = len(self.conn.events) > 1
        self._step_bytes = STEP_BYTES if is_busy else min(2 * self._step_bytes, 256 * 1024)
        super().handle_events()

    def handle_cont(self, event: Frame) -> None:
        self._fragment_bytes += len(event.data)
        count = len(self.frames)
        if count > MAX_FREE_FRAGMENTS and self._fragment_bytes < (count - MAX_FREE_FRAGMENTS) * MIN_FRAGMENT_BYTES:
            self._close_with_error(
                f"a message may have {MAX_FREE_FRAGMENTS} fragments; further ones must have {MIN_FRAGMENT_BYTES} bytes"
            )
        else:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._allow_control():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._allow_control():
            super().handle_pong(event)

    def _allow_control(self) -> bool:
        if self._received_at - self._controls_since > 1.0:
            self._control_frames, self._controls_since = 0, self._received_at
        self._control_frames += 1
        if self._control_frames > MAX_CONTROL_FRAMES or not self.writable.is_set():
            self._close_with_error(f"more than {MAX_CONTROL_FRAMES} pings and pongs per second, or unread answers")
            return False
        return True

    def refuse(self, error: PenstockError) -> None:
        self._connection_limits.incoming.drop(self)
        if self.handshake_complete:
            self._close_with_error(str(error)[:MAX_REASON_CHARS], CloseCode.TRY_AGAIN_LATER)
        else:
            self.transport.abort()

    def _close_with_error(self, reason: str, code: CloseCode = CloseCode.POLICY_VIOLATION) -> None:
        if self.transport.is_closing():
            return
        self.frames = []
        self._unparsed = b""
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def keepalive_timeout(self) -> None:
        """Close the connection for a missing pong, unless the pong may still be behind unread messages."""
        patience_s = self.ping_timeout or 0.0
        if self.read_paused or self.loop.time() - self._received_at < patience_s:
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
            self.handshake_complete = True  # uvicorn would log that a refused handshake got no answer

    def check_timeouts(self, now: float) -> None:
        """Abort the connection if its client reads no answers; called about once per second."""
        patience_s = self._connection_limits.limits.answer_timeout_s
        if self._sending.is_stuck(self.transport.get_write_buffer_size(), now, patience_s):
            self.transport.abort()

    def shutdown(self) -> None:
        """Send SHUTTING_DOWN to the application, which answers the running requests and then closes."""
        if self.transport.is_closing():
            return
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
            return
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.receive", "text": SHUTTING_DOWN})

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Abort the connection `close_timeout` after closing starts, because unread answers would keep it open."""
        super().on_task_complete(task)
        self.loop.call_later(self.close_timeout, self.transport.abort)


def _reject(reject: Any, status: Any, text: str) -> Any:
    response = reject(status, orjson.dumps({"error": text.strip()}).decode())
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    return response


def _encode_handshake_error(error: Exception) -> bytes:
    body = orjson.dumps({"error": f"the WebSocket handshake is invalid: {str(error)[:200]}"})
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINE[400] + head + body


def _is_text(data: bytes) -> bool:
    """Return whether the data is UTF-8. Decode it in pieces, to save memory."""
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
