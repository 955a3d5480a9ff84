"""uvicorn's HTTP connection, with a shorter way for inference requests that are small and plain.

ASGI costs such a request more than all that is done with it: a scope, a cycle, events in and out. What is not plain
(compressed or chunked, pipelined, asked to continue, sent by a page, for another host, not admitted) goes the usual
way, to the same endpoint.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from penstock.core.errors import PenstockError
from penstock.core.principals import ANYBODY, INFERRING, Principal
from penstock.gateway.http.bounded import BoundedProtocol, Phase
from penstock.gateway.http.doorman import Doorman
from penstock.gateway.http.oip.infer import HttpAnswer, InferEndpoint
from penstock.gateway.turnstile import Turnstile

INFER = re.compile(rb"/v2/models/([^/?#%]+)(?:/versions/([^/?#%]+))?/infer")
# Larger bodies come in parts and want to be refused before they are read.
PLAIN_BYTES = 64 * 1024
PLAIN_HEADERS = 16  # what has more is counted first
# Headers that ask for more than the short way has.
UNUSUAL = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site"))


class InferProtocol(BoundedProtocol):
    def __init__(self, endpoint: InferEndpoint, doorman: Doorman, turnstile: Turnstile, **options: Any) -> None:
        super().__init__(turnstile, **options)
        self._endpoint = endpoint
        self._doorman = doorman
        self._inference: asyncio.Task[None] | None = None

    def on_headers_complete(self) -> None:
        request = self._plain_request()
        if request is None:
            super().on_headers_complete()
        else:
            self._phase = Phase.BODY
            self.cycle = request  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        request: Any = self.cycle
        if type(request) is not _PlainRequest:
            super().on_body(body)
        else:
            request.body = request.body + body if request.body else body

    def still_coming(self, framing_bytes: int) -> None:
        request: Any = self.cycle
        if type(request) is _PlainRequest:
            more = len(request.body) - self._body_bytes
            self._body_bytes += more
            self.hold(more)
        else:
            super().still_coming(framing_bytes)

    def on_message_complete(self) -> None:
        request: Any = self.cycle
        if type(request) is _PlainRequest:
            self.came_whole()
            task = self._inference = self.loop.create_task(self._infer(request))
            self.tasks.add(task)  # the server waits for them when it stops
            task.add_done_callback(self.tasks.discard)
        else:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._inference is not None:
            self._inference.cancel()  # nobody is there to hear the answer

    def _plain_request(self) -> "_PlainRequest | None":
        found = INFER.fullmatch(self.url)
        if self._is_bulky or self._header_bytes or len(self.headers) > PLAIN_HEADERS:
            return None
        if found is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        before: Any = self.cycle
        if before is not None and not before.response_complete:
            return None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > 8 or int(length) > PLAIN_BYTES:
            return None
        if not UNUSUAL.isdisjoint(headers) or len(headers) < len(self.headers):
            return None
        doorman, principal = self._doorman, ANYBODY
        if not doorman.answers_to(headers.get(b"host", b"")):
            return None
        if not doorman.guard.is_open:
            try:
                principal = doorman.admit(self.headers, INFERRING, self._certificate)
            except PenstockError:
                return None  # the usual way says why
        model, version = found.group(1, 2)
        try:
            names = model.decode("ascii"), (version or b"").decode("ascii")
        except UnicodeDecodeError:
            return None
        return _PlainRequest(headers, *names, self.parser.should_keep_alive(), principal)

    async def _infer(self, request: "_PlainRequest") -> None:
        answer = await self._endpoint.infer(
            request.headers, request.body, request.model, request.version, self._address or "", request.principal
        )
        if self.flow.write_paused:
            await self.flow.drain()
        if self.transport.is_closing():
            return
        self.transport.write(_encode(answer, request.keep_alive))
        request.response_complete = True
        if not request.keep_alive:
            self.transport.close()
        self.on_response_complete()


@dataclass(slots=True)
class _PlainRequest:
    """One request and its answer; stands where uvicorn has its cycle, with what it asks of one."""

    headers: dict[bytes, bytes]
    model: str
    version: str
    keep_alive: bool
    principal: Principal
    body: bytes = b""
    response_complete: bool = False
    disconnected: bool = False
    message_event: ClassVar = asyncio.Event()  # nobody waits for it: the task is cancelled instead


def _encode(answer: HttpAnswer, keep_alive: bool) -> bytes:
    parts = [STATUS_LINE[answer.status], b"content-type: ", answer.media_type, b"\r\ncontent-length: "]
    parts.append(str(len(answer.body)).encode())
    for name, value in answer.headers:
        parts += [b"\r\n", name, b": ", value]
    parts += [b"\r\n\r\n" if keep_alive else b"\r\nconnection: close\r\n\r\n", answer.body]
    return b"".join(parts)
