"""Inference over REST, before any routing: as plain ASGI, and for connections that spare themselves ASGI."""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson
import structlog

from penstock.core.config import Limits
from penstock.core.errors import BUG, InternalError, InvalidRequest, PenstockError
from penstock.core.principals import INFERRING, Principal
from penstock.core.requests import InferRequest
from penstock.gateway import statuses
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http import message as http_message
from penstock.gateway.http.attendance import serve_attended
from penstock.gateway.http.doorman import Doorman
from penstock.gateway.http.message import JSON, OCTETS, ClientLeft, Headers, Receive, Scope, Send, read_body
from penstock.gateway.http.oip.codec import (
    KnownHeaders,
    OutputForm,
    decode_infer,
    decode_raw,
    encode_infer,
    large_json_bytes,
)
from penstock.gateway.large import LARGE_BYTES, LargeMessages
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.serving.serve import Serving

log = structlog.get_logger()
HEADER_LENGTH = b"inference-header-content-length"


@dataclass(slots=True)
class HttpAnswer:
    status: int
    media_type: bytes
    body: bytes
    headers: list[tuple[bytes, bytes]]


class InferEndpoint:
    def __init__(
        self,
        serving: Serving,
        catalogue: Catalogue,
        limits: Limits,
        large: LargeMessages,
        doorman: Doorman,
        memory: SharedMemory | None = None,
    ) -> None:
        self._serving = serving
        self._catalogue = catalogue
        self._limits = limits
        self._large = large
        self._doorman = doorman
        self._memory = memory
        self._headers = KnownHeaders(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        headers: Headers = dict(scope["headers"])
        try:
            principal = self._doorman.admit_scope(scope, INFERRING)
            client = (scope.get("client") or ("",))[0]
            self._serving.meter.check(principal, client)
            reading = read_body(headers, receive, self._large)
            answer = await self.infer(
                headers, await reading, model, version, client, principal, receive
            )  # which lets go of the body
        except ClientLeft:
            return
        except PenstockError as error:  # it may not come in, or the body could not be read
            answer = self._turn_away(error)
        length = str(len(answer.body)).encode()
        every = [(b"content-type", answer.media_type), (b"content-length", length), *answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": every})
        await send({"type": "http.response.body", "body": answer.body})

    async def infer(
        self,
        headers: Headers,
        body: bytes,
        model: str,
        version: str,
        client: str,
        principal: Principal,
        receive: Receive | None = None,
    ) -> HttpAnswer:
        """Without `receive`, the caller cancels it when the client leaves; with it, raises ClientLeft."""
        try:
            try:
                if len(body) <= LARGE_BYTES:
                    request, form = self._decode(headers, body, model, version, principal)
                else:
                    request, form = await self._decode_large(headers, body, model, version, principal)
            except PenstockError as error:
                return self._turn_away(error)
            del body
            request.client = client
            if receive is None:
                response = await self._serving.serve(request)
            else:
                response = await serve_attended(self._serving, request, receive)
            given = response, request.parameters, form, self._limits
            if size_bytes := large_json_bytes(response, form):
                encoded, header_length = await self._large.encode(size_bytes, encode_infer, *given)
            else:
                encoded, header_length = encode_infer(*given)
            answer = await self._answer(headers, encoded, header_length)
            if request.standings:
                answer.headers += _encoded(statuses.limit_headers(request.standings))
            return answer
        except PenstockError as error:
            return _refusal(error)
        except ClientLeft:
            raise
        except Exception:  # a bug of ours: the client is told so in the protocol's own words
            log.exception("bug", where="rest")
            return _refusal(InternalError(BUG))

    def turned_away(self, error: PenstockError) -> None:
        self._serving.turned_away("rest", error)

    def _turn_away(self, error: PenstockError) -> HttpAnswer:
        self.turned_away(error)
        return _refusal(error)

    async def _decode_large(
        self, headers: Headers, body: bytes, model: str, version: str, principal: Principal
    ) -> tuple[InferRequest, OutputForm]:
        """Only JSON takes long: tensors behind it are not looked at."""
        length = headers.get(HEADER_LENGTH)
        if length is not None and (not length.isdigit() or len(length) > 18 or int(length) <= LARGE_BYTES):
            return self._decode(headers, body, model, version, principal)
        return await self._large.decode(len(body), self._decode, headers, body, model, version, principal)

    def _decode(
        self, headers: Headers, body: bytes, model: str, version: str, principal: Principal
    ) -> tuple[InferRequest, OutputForm]:
        length, memory = headers.get(HEADER_LENGTH), self._memory
        if memory is not None and principal.key_id:
            memory = memory.of(principal.key_id)
        if length is None:
            request, form = decode_infer(body, memory=memory, limits=self._limits)
        else:
            if not length.isdigit() or len(length) > 18 or int(length) > len(body):
                raise InvalidRequest(
                    f"Inference-Header-Content-Length must be a number of bytes, at most the body's {len(body)}"
                )
            end = int(length)
            if end == 0:
                request, form = decode_raw(self._catalogue.described(model, version, principal), body)
            else:
                view = memoryview(body)
                request, form = self._headers.decode(view[:end], view[end:], memory)
        request.model, request.version, request.protocol = model, version, "rest"
        request.principal = principal
        request.request_id = request.request_id or http_message.request_id(headers)
        request.timeout_s = http_message.timeout_s(headers)
        request.traceparent = http_message.traceparent(headers)
        return request, form

    async def _answer(self, headers: Headers, body: bytes, header_length: int | None) -> HttpAnswer:
        extra: list[tuple[bytes, bytes]] = []
        if header_length is not None:
            extra.append((HEADER_LENGTH, str(header_length).encode()))
        if b"accept-encoding" in headers:
            body, encoding = await http_message.compress(body, headers, self._large)
            if encoding is not None:
                extra.append((b"content-encoding", encoding.encode()))
        return HttpAnswer(200, JSON if header_length is None else OCTETS, body, extra)


def _refusal(error: PenstockError) -> HttpAnswer:
    body = orjson.dumps({"error": statuses.told(error)})
    return HttpAnswer(statuses.http_code(error), JSON, body, _encoded(statuses.headers(error)))


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
