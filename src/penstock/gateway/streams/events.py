"""Server-sent events: an answer that is told as it comes to be."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import orjson
import structlog
from fastapi.responses import Response

from penstock.core.errors import BUG, InternalError, PenstockError
from penstock.gateway.http.attendance import Attendance
from penstock.gateway.http.message import ClientLeft, Receive, Scope, Send

log = structlog.get_logger()
EVENT_STREAM = "text/event-stream"
EVENT_HEADERS = {
    "content-type": f"{EVENT_STREAM}; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy must not hold events back
}


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def json_event(content: object) -> bytes:
    return event(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


class EventStream(Response):
    """What fails before the first event is raised, for the status to say so; what fails later is the last event.

    It ends with its events, or when its client leaves: they are closed, and with them what makes them. A client that
    does not take them stops them; the connection ends one that takes none for long.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        told: Callable[[PenstockError], bytes],
        headers: Callable[[], Mapping[str, str]] = dict,
        send_s: float | None = None,
    ) -> None:
        """`told` makes an event of what failed; `headers` are asked for at the first event; `send_s`: who takes nothing
        for so long is given up."""
        super().__init__()
        self._events = events
        self._told = told
        self._make_headers = headers
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            with Attendance(receive):
                async with aclosing(self._events) as events:
                    async for each in events:
                        if not has_begun:
                            await send(self._start())
                            has_begun = True
                        await self._send(send, each)
            if not has_begun:
                await send(self._start())
                has_begun = True
            await self._send(send, b"", is_last=True)  # to who attends, a client whose answer is whole has left
        except (ClientLeft, TimeoutError):
            if not has_begun:
                raise
        except Exception as error:
            if not has_begun:
                raise
            await self._send(send, self._told(_known(error)))
            await self._send(send, b"", is_last=True)

    def _start(self) -> dict[str, object]:
        headers = {**EVENT_HEADERS, **self._make_headers()}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": encoded}

    async def _send(self, send: Send, body: bytes, is_last: bool = False) -> None:
        """Waits while the client's buffers are full."""
        message = {"type": "http.response.body", "body": body, "more_body": not is_last}
        if self._send_s is None:
            await send(message)
        else:
            async with asyncio.timeout(self._send_s):
                await send(message)


def _known(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    log.error("bug", where="events", exc_info=error)
    return InternalError(BUG)
