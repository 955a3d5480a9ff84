"""Inference over REST, answered before FastAPI's routing: through ASGI, and without ASGI for small requests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson
import structlog

from penstock.core.config import Limits
from penstock.core.errors import BUG_MESSAGE, InternalError, InvalidRequest, PenstockError
from penstock.core.principals import INFERENCE_SCOPES, Principal
from penstock.core.requests import InferRequest
from penstock.endpoints import statuses
from penstock.endpoints.http import http_message
from penstock.endpoints.http.disconnect_watch import DisconnectWatch
from penstock.endpoints.http.http_guard import HttpGuard, get_certificate
from penstock.endpoints.http.http_message import (
    JSON,
    OCTET_STREAM,
    ClientLeft,
    Headers,
    Receive,
    Scope,
    Send,
    read_body,
)
from penstock.endpoints.large_messages import LARGE_BYTES, LargeMessagePool
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.oip.rest_codec import (
    HeaderCache,
    OutputForm,
    count_large_json_bytes,
    decode_infer,
    decode_raw,
    encode_infer,
)
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
    """The REST endpoint for inference, which decodes a request, serves it and encodes the answer."""

    def __init__(
        self,
        serving: Serving,
        catalogue: Catalogue,
        limits: Limits,
        large: LargeMessagePool,
        http_guard: HttpGuard,
        memory: SharedMemory | None = None,
    ) -> None:
        self._serving = serving
        self._catalogue = catalogue
        self._limits = limits
        self._large = large
        self._http_guard = http_guard
        self._memory = memory
        self._headers = HeaderCache(limits)

    def admit(self, headers: Iterable[tuple[bytes, bytes]], certificate: tuple[str, ...]) -> Principal:
        """Return the caller, or raise Unauthenticated or Forbidden. Both the ASGI path and the short path call this."""
        return self._http_guard.admit(headers, INFERENCE_SCOPES, certificate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        headers: Headers = dict(scope["headers"])
        try:
            principal = self.admit(scope["headers"], get_certificate(scope))
            client = (scope.get("client") or ("",))[0]
            self._serving.meter.check(principal, client)
            reading = read_body(headers, receive, self._large)
            # The body has no name here, so that `infer` can free it.
            answer = await self.infer(headers, await reading, model, version, client, principal, receive)
        except ClientLeft:
            return
        except PenstockError as error:  # the caller is not admitted, or the body could not be read
            answer = self._reject(error)
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
        """Return the answer to a request.

        With `receive`, raise ClientLeft when the client disconnects; without it, the caller cancels this call instead.
        """
        try:
            try:
                if len(body) <= LARGE_BYTES:
                    request, form = self._decode(headers, body, model, version, principal)
                else:
                    request, form = await self._decode_large(headers, body, model, version, principal)
            except PenstockError as error:
                rejected = InferRequest(model, [], version, http_message.read_request_id(headers), principal=principal)
                return self._reject(error, rejected)
            del body
            request.client = client
            if receive is None:
                response = await self._serving.serve(request)
            else:
                with DisconnectWatch(receive):
                    response = await self._serving.serve(request)
            arguments, limit_statuses = (response, request.parameters, form, self._limits), request.limit_statuses
            del request, response  # frees tensors that the answer does not need
            if size_bytes := count_large_json_bytes(arguments[0], form):
                encoded, header_length = await self._large.encode(size_bytes, encode_infer, *arguments)
            else:
                encoded, header_length = encode_infer(*arguments)
            del arguments
            answer = await self._answer(headers, encoded, header_length)
            if limit_statuses:
                answer.headers += _encode_headers(statuses.make_limit_headers(limit_statuses))
            return answer
        except PenstockError as error:
            return _encode_refusal(error)
        except ClientLeft:
            raise
        except Exception:  # a bug in Penstock; the client receives an error of the protocol
            log.exception("bug", where="rest")
            return _encode_refusal(InternalError(BUG_MESSAGE))

    def count_rejected(self, error: PenstockError) -> None:
        self._serving.count_rejected("rest", error)

    def _reject(self, error: PenstockError, request: InferRequest | None = None) -> HttpAnswer:
        self._serving.count_rejected("rest", error, request)
        return _encode_refusal(error)

    async def _decode_large(
        self, headers: Headers, body: bytes, model: str, version: str, principal: Principal
    ) -> tuple[InferRequest, OutputForm]:
        """Decode a large request, in a thread if its JSON is large. Binary tensors take no time to decode."""
        length = headers.get(HEADER_LENGTH)
        if length is not None and (not length.isdigit() or len(length) > 18 or int(length) <= LARGE_BYTES):
            return self._decode(headers, body, model, version, principal)
        return await self._large.decode(len(body), self._decode, headers, body, model, version, principal)

    def _decode(
        self, headers: Headers, body: bytes, model: str, version: str, principal: Principal
    ) -> tuple[InferRequest, OutputForm]:
        length, memory = headers.get(HEADER_LENGTH), self._memory
        if memory is not None and principal.key_id:
            memory = memory.for_key(principal.key_id)
        if length is None:
            request, form = decode_infer(body, memory=memory, limits=self._limits)
        else:
            if not length.isdigit() or len(length) > 18 or int(length) > len(body):
                raise InvalidRequest(
                    f"Inference-Header-Content-Length must be a number of bytes, at most the body's {len(body)}"
                )
            end = int(length)
            if end == 0:
                request, form = decode_raw(self._catalogue.get_described_block(model, version, principal), body)
            else:
                view = memoryview(body)
                request, form = self._headers.decode(view[:end], view[end:], memory)
        request.model, request.version, request.protocol = model, version, "rest"
        request.principal = principal
        request.request_id = request.request_id or http_message.read_request_id(headers)
        request.timeout_s = http_message.read_timeout_s(headers)
        request.traceparent = http_message.read_traceparent(headers)
        return request, form

    async def _answer(self, headers: Headers, body: bytes, header_length: int | None) -> HttpAnswer:
        extra: list[tuple[bytes, bytes]] = []
        if header_length is not None:
            extra.append((HEADER_LENGTH, str(header_length).encode()))
        if b"accept-encoding" in headers:
            body, encoding = await http_message.compress(body, headers, self._large)
            if encoding is not None:
                extra.append((b"content-encoding", encoding.encode()))
        return HttpAnswer(200, JSON if header_length is None else OCTET_STREAM, body, extra)


def _encode_refusal(error: PenstockError) -> HttpAnswer:
    body = orjson.dumps({"error": statuses.make_public_message(error)})
    return HttpAnswer(statuses.get_http_code(error), JSON, body, _encode_headers(statuses.make_headers(error)))


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
