"""uvicorn's WebSocket connection, for peers that are read only as fast as they take their answers."""

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock.gateway.streams.websocket import LEAVING

NOT_TEXT = 1007
_NO_HANDSHAKE_BODY = b'{"error": "this is not the handshake of a WebSocket"}'
NO_HANDSHAKE = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
    % (len(_NO_HANDSHAKE_BODY), _NO_HANDSHAKE_BODY)
)


class StreamProtocol(WebSocketsSansIOProtocol):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._heard_at = 0.0

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # uvicorn would leave it unanswered
            self.transport.write(b"".join(self.conn.data_to_send()) or NO_HANDSHAKE)
            self.transport.close()

    def keepalive_timeout(self) -> None:
        """A pong waits behind the messages that are not read while the window is full: that is no dead peer."""
        patience_s = self.ping_timeout or 0.0
        if self.read_paused or self.loop.time() - self._heard_at < patience_s:
            self.pong_timer = self.loop.call_later(patience_s, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not _is_text(b"".join(self.frames)):
            self.frames = []
            self.conn.fail(NOT_TEXT, "a text message must be UTF-8")
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # refused, with an answer: else uvicorn logs that none was given

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


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
