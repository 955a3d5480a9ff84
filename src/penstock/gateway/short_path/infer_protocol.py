"""uvicorn's HTTP connection with a short path for small inference requests.

A request that is compressed, chunked, pipelined, sent by a web page, for an unknown host, refused by the guard, or has
an `Expect` header, goes through ASGI to the same endpoint.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.core.errors import PenstockError
from penstock.core.principals import Principal
from penstock.endpoints.connection_limits import ConnectionLimits
from penstock.endpoints.http.bounded_protocol import BoundedProtocol, Phase
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.endpoints.uvicorn_internals import STATUS_LINE
from penstock.gateway.oip.rest_infer import HttpAnswer, InferEndpoint

INFER_PATTERN = re.compile(rb"/v2/models/([^/?#%]+)(?:/versions/([^/?#%]+))?/infer")
# Larger bodies arrive in parts, and must be refused before they are read if they exceed a limit.
MAX_PLAIN_BYTES = 64 * 1024
MAX_PLAIN_HEADERS = 16  # with more headers, the limits on headers must be checked
# Headers that the short path does not support.
UNSUPPORTED_HEADERS = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site", b"prefer")
)


class InferProtocol(BoundedProtocol):
    """A connection that answers small inference requests without ASGI."""

    def __init__(
        self, endpoint: InferEndpoint, http_guard: HttpGuard, connection_limits: ConnectionLimits, **options: Any
    ) -> None:
        super().__init__(connection_limits, **options)
        self._endpoint = endpoint
        self._http_guard = http_guard
        self._inference: asyncio.Task[None] | None = None

    def on_headers_complete(self) -> None:
        self.read_edge_identity()
        request = self._read_plain_request()
        if request is None:
            super().on_headers_complete()
        else:
            self._phase = Phase.BODY
            self.cycle = request  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        request: Any = self.cycle
        if type(request) is not PlainRequest:
            super().on_body(body)
        else:
            request.body = request.body + body if request.body else body

    def check_framing(self, framing_bytes: int) -> None:
        request: Any = self.cycle
        if type(request) is PlainRequest:
            more = len(request.body) - self._body_bytes
            self._body_bytes += more
            self.hold_body(more)
        else:
            super().check_framing(framing_bytes)

    def on_message_complete(self) -> None:
        request: Any = self.cycle
        if type(request) is PlainRequest:
            self.complete_request()
            task = self._inference = self.loop.create_task(self._infer(request))
            self.tasks.add(task)  # the server waits for these tasks when it stops
            task.add_done_callback(self.tasks.discard)
        else:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._inference is not None:
            self._inference.cancel()  # nobody would receive the answer

    def _read_plain_request(self) -> "PlainRequest | None":
        found = INFER_PATTERN.fullmatch(self.url)
        if self._is_large_read or self._header_bytes or len(self.headers) > MAX_PLAIN_HEADERS:
            return None
        if found is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        before: Any = self.cycle
        if before is not None and not before.response_complete:
            return None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > 8 or int(length) > MAX_PLAIN_BYTES:
            return None
        if not UNSUPPORTED_HEADERS.isdisjoint(headers) or len(headers) < len(self.headers):
            return None
        if not self._http_guard.is_own_host(headers.get(b"host", b"")):
            return None
        try:
            principal = self._endpoint.admit(self.headers, self._certificate)
        except PenstockError:
            return None  # the ASGI path refuses the request with the reason
        model, version = found.group(1, 2)
        try:
            names = model.decode("ascii"), (version or b"").decode("ascii")
        except UnicodeDecodeError:
            return None
        return PlainRequest(headers, *names, self.parser.should_keep_alive(), principal)

    async def _infer(self, request: "PlainRequest") -> None:
        answer = await self._endpoint.infer(
            request.headers,
            request.body,
            request.model,
            request.version,
            self.client[0] if self.client else "",
            request.principal,
        )
        if self.flow.write_paused:
            await self.flow.drain()
        if self.transport.is_closing():
            return
        self.transport.write(_encode_answer(answer, request.keep_alive))
        request.response_complete = True
        if not request.keep_alive:
            self.transport.close()
        self.on_response_complete()


@dataclass(slots=True)
class PlainRequest:
    """A request on the short path, in the place of uvicorn's `cycle`, with the attributes that uvicorn reads."""

    headers: dict[bytes, bytes]
    model: str
    version: str
    keep_alive: bool
    principal: Principal
    body: bytes = b""
    response_complete: bool = False
    disconnected: bool = False
    message_event: ClassVar = asyncio.Event()  # uvicorn sets it on a disconnect; the task is cancelled instead


def _encode_answer(answer: HttpAnswer, keep_alive: bool) -> bytes:
    parts = [STATUS_LINE[answer.status], b"content-type: ", answer.media_type, b"\r\ncontent-length: "]
    parts.append(str(len(answer.body)).encode())
    for name, value in answer.headers:
        parts += [b"\r\n", name, b": ", value]
    parts += [b"\r\n\r\n" if keep_alive else b"\r\nconnection: close\r\n\r\n", answer.body]
    return b"".join(parts)
