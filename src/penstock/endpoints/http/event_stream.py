"""Server-sent events: an answer that is sent while it is produced."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import orjson
import structlog
from fastapi.responses import Response

from penstock.core.errors import BUG_MESSAGE, InternalError, PenstockError
from penstock.endpoints.http.disconnect_watch import DisconnectWatch
from penstock.endpoints.http.http_message import ClientLeft, Receive, Scope, Send

log = structlog.get_logger()
EVENT_STREAM = "text/event-stream"
EVENT_HEADERS = {
    "content-type": f"{EVENT_STREAM}; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy must not hold events back
}


def encode_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def encode_json_event(content: object) -> bytes:
    return encode_event(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


class EventStream(Response):
    """An answer of server-sent events.

    An error before the first event is raised, and becomes the HTTP status; a later error becomes the last event. The
    generator of the events is closed at the end, or when the client disconnects. The next event is generated only when
    the connection can take it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        encode_error: Callable[[PenstockError], bytes],
        headers: Callable[[], Mapping[str, str]] = dict,
        send_timeout_s: float | None = None,
    ) -> None:
        """Create an answer.

        `encode_error` encodes an error as an event. `headers` is called at the first event. The stream ends if the
        client reads nothing for `send_timeout_s`.
        """
        super().__init__()
        self._events = events
        self._encode_error = encode_error
        self._make_headers = headers
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        try:
            with DisconnectWatch(receive):
                async with aclosing(self._events) as events:
                    async for each in events:
                        if not has_started:
                            await send(self._start_message())
                            has_started = True
                        await self._send_part(send, each)
            if not has_started:
                await send(self._start_message())
                has_started = True
            # DisconnectWatch takes the end of the answer for a disconnect.
            await self._send_part(send, b"", is_last=True)
        except (ClientLeft, TimeoutError):
            if not has_started:
                raise
        except Exception as error:
            if not has_started:
                raise
            await self._send_part(send, self._encode_error(_to_penstock_error(error)))
            await self._send_part(send, b"", is_last=True)

    def _start_message(self) -> dict[str, object]:
        headers = {**EVENT_HEADERS, **self._make_headers()}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": encoded}

    async def _send_part(self, send: Send, body: bytes, is_last: bool = False) -> None:
        """Send a part of the body; wait while the connection's buffers are full."""
        message = {"type": "http.response.body", "body": body, "more_body": not is_last}
        if self._send_timeout_s is None:
            await send(message)
        else:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)


def _to_penstock_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    log.error("bug", where="events", exc_info=error)
    return InternalError(BUG_MESSAGE)
