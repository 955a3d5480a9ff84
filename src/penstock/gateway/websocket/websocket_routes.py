"""Inference over WebSockets: each connection is a stream of requests for one model."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.core.errors import (
    Cancelled,
    Draining,
    Forbidden,
    InvalidRequest,
    ModelNotReady,
    PenstockError,
    RequestTooLarge,
    Unauthenticated,
)
from penstock.core.principals import INFERENCE_SCOPES, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.endpoints import statuses
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.http import http_message
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.endpoints.http.http_message import ClientLeft
from penstock.endpoints.http.openapi import make_json_answer
from penstock.endpoints.http.websocket_protocol import GOING_AWAY, MAX_REASON_CHARS, NOT_ADMITTED, SHUTTING_DOWN, Utf8
from penstock.endpoints.large_messages import LARGE_BYTES, LargeMessagePool
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.oip.rest_codec import OutputForm, count_large_json_bytes
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.websocket.request_stream import FINAL_PARAMETER, RequestStream
from penstock.gateway.websocket.websocket_codec import (
    Message,
    RawForm,
    count_json_bytes,
    decode_message,
    encode_answer,
    encode_error,
    find_id,
)
from penstock.serving.serve import Serving

PROTOCOL = "websocket"
STREAM_PATHS = ("/v2/models/{model}/stream", "/v2/models/{model}/versions/{version}/stream")
BOOLEANS = {"true": True, "false": False}


def create_websocket_routes(
    serving: Serving,
    catalogue: Catalogue,
    large: LargeMessagePool,
    http_guard: HttpGuard,
    memory: SharedMemory | None = None,
) -> APIRouter:
    edge = WebSocketEdge(serving, catalogue, large, http_guard, memory)
    router = APIRouter()
    for path in STREAM_PATHS:
        router.add_websocket_route(path, edge.serve)
    return router


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options in the query of a stream's URL."""

    is_ordered: bool = True
    raw: RawForm | None = None


IMAGE_OPTIONS = ("format", "quality", "resolution", "mode")  # request parameters of the task upscale


def read_options(query: Mapping[str, str]) -> StreamOptions:
    for name in query:
        if name not in ("input", "output", "ordered", *IMAGE_OPTIONS):
            raise InvalidRequest(
                f"unknown query parameter '{name[:80]}': use 'input', 'output', 'ordered' or, with raw messages, "
                f"{', '.join(map(repr, IMAGE_OPTIONS))}"
            )
    options = {name: _parse_image_option(name, query[name]) for name in IMAGE_OPTIONS if name in query}
    ordered = query.get("ordered", "true").lower()
    if ordered not in BOOLEANS:
        raise InvalidRequest(f"'ordered' must be true or false, not '{ordered[:40]}'")
    given, wanted = query.get("input"), query.get("output")
    if not given and not wanted:
        if options:
            raise InvalidRequest(
                f"'{next(iter(options))}' is only for raw messages; JSON messages have it in their 'parameters'"
            )
        return StreamOptions(BOOLEANS[ordered])
    if not given or not wanted:
        raise InvalidRequest("raw messages need both: ?input=NAME&output=NAME")
    if not BOOLEANS[ordered]:
        raise InvalidRequest("raw messages have no ids, so 'ordered' must be true")
    return StreamOptions(raw=RawForm(given, wanted, options))


def _parse_image_option(name: str, value: str) -> str | int:
    return int(value) if name == "quality" and value.isdecimal() else value


class WebSocketEdge:
    def __init__(
        self,
        serving: Serving,
        catalogue: Catalogue,
        large: LargeMessagePool,
        http_guard: HttpGuard,
        memory: SharedMemory | None,
    ) -> None:
        self.serving = serving
        self.http_guard = http_guard
        self.catalogue = catalogue
        self.memory = memory
        self.large = large
        self.limits = large.limits

    @needs_scope(*INFERENCE_SCOPES)
    async def serve(self, websocket: WebSocket) -> None:
        try:
            connection = self._accept_connection(websocket)
        except PenstockError as error:
            self.serving.count_rejected(PROTOCOL, error)
            status, headers = statuses.get_http_code(error), statuses.make_headers(error)
            await websocket.send_denial_response(
                make_json_answer({"error": statuses.make_public_message(error)}, status, headers)
            )
            return
        await websocket.accept()

        async def send(message: Message) -> None:
            await websocket.send({"type": "websocket.send", "text" if isinstance(message, Utf8) else "bytes": message})

        is_ordered = connection.options.is_ordered
        stream: RequestStream[Message] = RequestStream(self.serving, is_ordered, PROTOCOL, connection.admit)
        try:
            await stream.run(connection.exchanges(websocket), send)
            await websocket.close(GOING_AWAY, "this server is shutting down")
        except (ClientLeft, WebSocketDisconnect, Cancelled):
            return  # the client disconnected
        except (Unauthenticated, Forbidden) as error:  # the key has expired or was revoked meanwhile
            self.serving.count_rejected(PROTOCOL, error)
            await websocket.close(NOT_ADMITTED, statuses.make_public_message(error)[:MAX_REASON_CHARS])

    def _accept_connection(self, websocket: WebSocket) -> "_WebSocketConnection":
        """Return the connection, or raise the error to refuse it with. A model that is not ready yet is accepted."""
        principal = self.http_guard.admit_scope(websocket.scope, INFERENCE_SCOPES)
        if self.serving.admission.is_draining:
            raise Draining("this server is shutting down; connect to another")
        options = read_options(websocket.query_params)
        model, version = websocket.path_params["model"], websocket.path_params.get("version", "")
        try:
            block = self.catalogue.resolver.resolve(model, version, principal)
            if options.raw is not None and block.is_described:
                options.raw.check(block)
        except ModelNotReady:
            pass
        connection = _WebSocketConnection(self, model, version, options, websocket.scope)
        connection.client = websocket.client.host if websocket.client else ""
        return connection


class _WebSocketConnection:
    def __init__(
        self,
        edge: WebSocketEdge,
        model: str,
        version: str,
        options: StreamOptions,
        scope: Mapping[str, Any],
    ) -> None:
        self.options = options
        self.client = ""
        self._edge = edge
        self._model = model
        self._version = version
        self._scope = scope
        headers = dict(scope["headers"])
        self._timeout_s = http_message.read_timeout_s(headers)
        self._traceparent = http_message.read_traceparent(headers)
        self._count = 0

    def admit(self) -> Principal:
        return self._edge.http_guard.admit_scope(self._scope, INFERENCE_SCOPES)

    async def exchanges(self, websocket: WebSocket) -> "AsyncIterator[_WebSocketExchange]":
        while (message := await _receive_message(websocket)) is not None:
            yield await self._open_exchange(message)
            del message  # free it while the next one is awaited

    async def _open_exchange(self, message: Message) -> "_WebSocketExchange":
        """Read a message. Raise if the client's key has expired or was revoked."""
        self._count += 1
        raw, edge = self.options.raw, self._edge
        principal = self.admit()
        memory = edge.memory and edge.memory.for_key(principal.key_id)
        form: OutputForm | RawForm
        try:
            if len(message) > edge.limits.max_message_bytes:
                raise RequestTooLarge(
                    f"the message is over limits.max_message_bytes ({edge.limits.max_message_bytes}): send less"
                )
            if raw is not None:
                request, form = raw.decode(message, self._count_dimensions(raw)), raw
                request.request_id = str(self._count)
            elif count_json_bytes(message) <= LARGE_BYTES:
                request, form = decode_message(message, memory, edge.limits)
            else:
                request, form = await edge.large.decode(len(message), decode_message, message, memory, edge.limits)
        except PenstockError as error:
            request_id = find_id(message) if raw is None else str(self._count)
            rejected = InferRequest(self._model, [], self._version, request_id, principal=principal)
            edge.serving.count_rejected(PROTOCOL, error, rejected)
            return _WebSocketExchange(edge.large, error, request_id, OutputForm(), message)
        request.model, request.version, request.protocol = self._model, self._version, PROTOCOL
        request.client, request.principal = self.client, principal
        request.timeout_s = self._timeout_s
        request.traceparent = self._traceparent
        return _WebSocketExchange(edge.large, request, request.request_id, form, message)

    def _count_dimensions(self, raw: RawForm) -> int:
        """Return the number of dimensions of the raw input; 1 if the model is not loaded yet."""
        try:
            block = self._edge.catalogue.resolver.resolve(self._model, self._version)
        except PenstockError:
            return 1  # serving raises the error again
        return next((len(spec.shape) for spec in block.inputs if spec.name == raw.input), 1)


class _WebSocketExchange:
    """One message and its answers."""

    __slots__ = ("_form", "_is_text", "_large", "_request_id", "request", "size_bytes")

    def __init__(
        self,
        large: LargeMessagePool,
        request: InferRequest | PenstockError,
        request_id: str,
        form: OutputForm | RawForm,
        message: Message,
    ) -> None:
        self._large = large
        self.request = request
        self.size_bytes = len(message)
        self._request_id = request_id
        self._form = form
        self._is_text = isinstance(message, Utf8)

    async def encode(self, response: InferResponse, is_decoupled: bool) -> tuple[Message, int]:
        encoded: Message
        if isinstance(self._form, RawForm):
            encoded = self._form.encode(response)
        else:
            assert isinstance(self.request, InferRequest), "an unreadable message has no response"
            if is_decoupled:
                response.parameters = {**response.parameters, FINAL_PARAMETER: response.is_final}
            arguments = response, self.request, self._form, self._is_text, self._large.limits
            if size_bytes := count_large_json_bytes(response, self._form):
                encoded = await self._large.encode(size_bytes, encode_answer, *arguments)
            else:
                encoded = encode_answer(*arguments)
        return encoded, len(encoded)

    def refuse(self, error: PenstockError) -> tuple[Message, int]:
        encoded = encode_error(error, self._request_id)
        return encoded, len(encoded)


async def _receive_message(websocket: WebSocket) -> Message | None:
    """Return the next message, or None when the server shuts down."""
    event = await websocket.receive()
    if event["type"] == "websocket.disconnect":
        raise ClientLeft
    text = event.get("text")
    if text is SHUTTING_DOWN:
        return None
    found: Message = event["bytes"] if text is None else text
    return found
