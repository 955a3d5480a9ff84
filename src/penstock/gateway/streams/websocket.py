"""Inference over WebSockets: a connection is a stream of requests for one model."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.access.guard import needs_scope
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
from penstock.core.principals import INFERRING, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway import statuses
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http import message as http_message
from penstock.gateway.http.doorman import Doorman
from penstock.gateway.http.message import ClientLeft
from penstock.gateway.http.oip.codec import OutputForm, large_json_bytes
from penstock.gateway.http.openapi import json_answer
from penstock.gateway.large import LARGE_BYTES, LargeMessages
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.streams.stream import FINAL, RequestStream
from penstock.gateway.streams.websocket_codec import (
    Message,
    RawForm,
    Utf8,
    decode_message,
    encode_answer,
    encode_error,
    find_id,
    json_bytes,
)
from penstock.serving.serve import Serving

PROTOCOL = "websocket"
PATHS = ("/v2/models/{model}/stream", "/v2/models/{model}/versions/{version}/stream")
FLAGS = {"true": True, "false": False}
GOING_AWAY = 1001
NOT_ADMITTED = 1008
REASON_CHARS = 100  # of what may be said when a connection is closed


class _Leaving(str):
    """What a connection says in place of a message when the server is about to leave: known by being itself."""


LEAVING = _Leaving()


def websocket_routes(
    serving: Serving,
    catalogue: Catalogue,
    large: LargeMessages,
    doorman: Doorman,
    memory: SharedMemory | None = None,
) -> APIRouter:
    edge = WebSocketEdge(serving, catalogue, large, doorman, memory)
    router = APIRouter()
    for path in PATHS:
        router.add_websocket_route(path, edge.serve)
    return router


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the address of a stream asks for."""

    is_ordered: bool = True
    raw: RawForm | None = None


def read_options(query: Mapping[str, str]) -> StreamOptions:
    for name in query:
        if name not in ("input", "output", "ordered"):
            raise InvalidRequest(f"a stream takes 'input', 'output' and 'ordered'; not '{name[:80]}'")
    ordered = query.get("ordered", "true").lower()
    if ordered not in FLAGS:
        raise InvalidRequest(f"'ordered' is true or false; not '{ordered[:40]}'")
    given, wanted = query.get("input"), query.get("output")
    if not given and not wanted:
        return StreamOptions(FLAGS[ordered])
    if not given or not wanted:
        raise InvalidRequest("raw messages need both: ?input=NAME&output=NAME")
    if not FLAGS[ordered]:
        raise InvalidRequest("raw messages have no ids: their answers come in order")
    return StreamOptions(raw=RawForm(given, wanted))


class WebSocketEdge:
    def __init__(
        self,
        serving: Serving,
        catalogue: Catalogue,
        large: LargeMessages,
        doorman: Doorman,
        memory: SharedMemory | None,
    ) -> None:
        self.serving = serving
        self.doorman = doorman
        self.catalogue = catalogue
        self.memory = memory
        self.large = large
        self.limits = large.limits

    @needs_scope(*INFERRING)
    async def serve(self, websocket: WebSocket) -> None:
        try:
            connection = self._accept(websocket)
        except PenstockError as error:
            self.serving.turned_away(PROTOCOL, error)
            status, headers = statuses.http_code(error), statuses.headers(error)
            await websocket.send_denial_response(json_answer({"error": statuses.told(error)}, status, headers))
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
            return  # nobody is there to be told
        except (Unauthenticated, Forbidden) as error:  # by now: its key has expired or was revoked
            self.serving.turned_away(PROTOCOL, error)
            await websocket.close(NOT_ADMITTED, statuses.told(error)[:REASON_CHARS])

    def _accept(self, websocket: WebSocket) -> "_WebSocketConnection":
        """Raises what refuses the connection; a model that is only not ready may be soon."""
        principal = self.doorman.admit_scope(websocket.scope, INFERRING)
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
        self._timeout_s = http_message.timeout_s(headers)
        self._traceparent = http_message.traceparent(headers)
        self._count = 0

    def admit(self) -> Principal:
        return self._edge.doorman.admit_scope(self._scope, INFERRING)

    async def exchanges(self, websocket: WebSocket) -> "AsyncIterator[_WebSocketExchange]":
        while (message := await _receive(websocket)) is not None:
            yield await self._open_exchange(message)
            del message  # the next may be long in coming

    async def _open_exchange(self, message: Message) -> "_WebSocketExchange":
        """Raises where its sender is admitted no more."""
        self._count += 1
        raw, edge = self.options.raw, self._edge
        principal = self.admit()
        memory = edge.memory and edge.memory.of(principal.key_id)
        form: OutputForm | RawForm
        try:
            if len(message) > edge.limits.max_message_bytes:
                raise RequestTooLarge(
                    f"the message is over limits.max_message_bytes ({edge.limits.max_message_bytes}): send less"
                )
            if raw is not None:
                request, form = raw.decode(message, self._rank(raw)), raw
                request.request_id = str(self._count)
            elif json_bytes(message) <= LARGE_BYTES:
                request, form = decode_message(message, memory, edge.limits)
            else:
                request, form = await edge.large.decode(len(message), decode_message, message, memory, edge.limits)
        except PenstockError as error:
            edge.serving.turned_away(PROTOCOL, error)
            request_id = find_id(message) if raw is None else str(self._count)
            return _WebSocketExchange(edge.large, error, request_id, OutputForm(), message)
        request.model, request.version, request.protocol = self._model, self._version, PROTOCOL
        request.client, request.principal = self.client, principal
        request.timeout_s = self._timeout_s
        request.traceparent = self._traceparent
        return _WebSocketExchange(edge.large, request, request.request_id, form, message)

    def _rank(self, raw: RawForm) -> int:
        """How many dimensions the raw input has; 1 where the model is not loaded yet."""
        try:
            block = self._edge.catalogue.resolver.resolve(self._model, self._version)
        except PenstockError:
            return 1  # serving says what is wrong
        return next((len(spec.shape) for spec in block.inputs if spec.name == raw.input), 1)


class _WebSocketExchange:
    """One message and its answers."""

    __slots__ = ("_form", "_is_text", "_large", "_request_id", "request", "size_bytes")

    def __init__(
        self,
        large: LargeMessages,
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
            assert isinstance(self.request, InferRequest), "only what could be read is answered so"
            if is_decoupled:
                response.parameters = {**response.parameters, FINAL: response.is_final}
            given = response, self.request, self._form, self._is_text, self._large.limits
            if size_bytes := large_json_bytes(response, self._form):
                encoded = await self._large.encode(size_bytes, encode_answer, *given)
            else:
                encoded = encode_answer(*given)
        return encoded, len(encoded)

    def refuse(self, error: PenstockError) -> tuple[Message, int]:
        encoded = encode_error(error, self._request_id)
        return encoded, len(encoded)


async def _receive(websocket: WebSocket) -> Message | None:
    """The next message; none when the server is about to leave."""
    event = await websocket.receive()
    if event["type"] == "websocket.disconnect":
        raise ClientLeft
    text = event.get("text")
    if text is LEAVING:
        return None
    found: Message = event["bytes"] if text is None else text
    return found
