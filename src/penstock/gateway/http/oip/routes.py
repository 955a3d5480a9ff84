"""The Open Inference Protocol over REST, with Triton's extensions."""

from dataclasses import dataclass

import orjson
import structlog
from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.core.config import Limits
from penstock.core.errors import InternalError, InvalidRequest, PenstockError
from penstock.core.requests import InferRequest
from penstock.gateway import model_config, statuses
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.grpc.oip import INDEX_STATES, READY
from penstock.gateway.http import message as http_message
from penstock.gateway.http import schemas
from penstock.gateway.http.attendance import ClientLeft, serve_attended
from penstock.gateway.http.message import JSON, OCTETS, Headers, Receive, Scope, Send, parse_object, read_body
from penstock.gateway.http.oip.codec import OutputForm, decode_infer, decode_parameters, decode_raw, encode_infer
from penstock.gateway.http.openapi import Handler, Route, add_routes, json_answer, path_names
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.serving.serve import Serving

log = structlog.get_logger()
HEADER_LENGTH = b"inference-header-content-length"
NOTHING = memoryview(b"")
MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@dataclass(slots=True)
class HttpAnswer:
    status: int
    media_type: bytes
    body: bytes
    headers: list[tuple[bytes, bytes]]


class InferEndpoint:
    """The hot path, before any routing: as plain ASGI, and for connections that spare themselves ASGI."""

    def __init__(
        self, serving: Serving, catalogue: Catalogue, limits: Limits, memory: SharedMemory | None = None
    ) -> None:
        self._serving = serving
        self._catalogue = catalogue
        self._limits = limits
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        headers: Headers = dict(scope["headers"])
        try:
            body = await read_body(headers, receive, self._limits.max_message_bytes)
        except ClientLeft:
            return
        except PenstockError as error:
            self._serving.turned_away("rest", error)
            answer = _refusal(error)
        else:
            try:
                answer = await self.infer(headers, body, model, version, receive)
            except ClientLeft:
                return
        await http_message.answer(send, answer.status, answer.media_type, answer.body, answer.headers)

    async def infer(
        self, headers: Headers, body: bytes, model: str, version: str, receive: Receive | None = None
    ) -> HttpAnswer:
        """Without `receive`, the caller cancels it when the client leaves; with it, raises ClientLeft."""
        try:
            try:
                request, form = self._decode(headers, body, model, version)
            except PenstockError as error:
                self._serving.turned_away("rest", error)
                raise
            del body
            if receive is None:
                response = await self._serving.serve(request)
            else:
                response = await serve_attended(self._serving, request, receive)
            encoded, header_length = encode_infer(response, request.parameters, form)
            return await _answer(headers, encoded, header_length)
        except PenstockError as error:
            return _refusal(error)
        except ClientLeft:
            raise
        except Exception:  # a bug of ours: the client is told so in the protocol's own words
            log.exception("bug", where="rest")
            return _refusal(InternalError("the server failed; its log says more"))

    def _decode(self, headers: Headers, body: bytes, model: str, version: str) -> tuple[InferRequest, OutputForm]:
        length = headers.get(HEADER_LENGTH)
        if length is None:
            request, form = decode_infer(body, NOTHING, self._memory)
        else:
            if not length.isdigit() or len(length) > 18 or int(length) > len(body):
                raise InvalidRequest(
                    f"Inference-Header-Content-Length must be a number of bytes, at most the body's {len(body)}"
                )
            end = int(length)
            if end == 0:
                request, form = decode_raw(self._catalogue.described(model, version), body)
            else:
                view = memoryview(body)
                request, form = decode_infer(view[:end], view[end:], self._memory)
        request.model, request.version, request.protocol = model, version, "rest"
        request.request_id = request.request_id or http_message.request_id(headers)
        request.timeout_s = http_message.timeout_s(headers)
        request.traceparent = http_message.traceparent(headers)
        return request, form


async def _answer(headers: Headers, body: bytes, header_length: int | None) -> HttpAnswer:
    extra: list[tuple[bytes, bytes]] = []
    if header_length is not None:
        extra.append((HEADER_LENGTH, str(header_length).encode()))
    if b"accept-encoding" in headers:
        body, encoding = await http_message.compress(body, headers)
        if encoding is not None:
            extra.append((b"content-encoding", encoding.encode()))
    return HttpAnswer(200, JSON if header_length is None else OCTETS, body, extra)


def _refusal(error: PenstockError) -> HttpAnswer:
    headers = [(name.encode(), value.encode()) for name, value in statuses.headers(error).items()]
    return HttpAnswer(statuses.http_code(error), JSON, orjson.dumps({"error": error.message}), headers)


class OipRest:
    """Everything of the protocol beside inference."""

    def __init__(self, catalogue: Catalogue, limits: Limits) -> None:
        self._catalogue = catalogue
        self._limits = limits

    def router(self) -> APIRouter:
        return add_routes(
            "Open Inference Protocol",
            [
                Route("GET", "/v2", self.server_metadata, "Server metadata", answer=schemas.ServerMetadata),
                Route("GET", "/v2/health/live", self.live, "Is the process alive?", answer=schemas.Live),
                Route("GET", "/v2/health/ready", self.ready, "Can requests be served?", answer=schemas.Ready),
                Route("GET", "/v2/models/stats", self.statistics, "Statistics of all", answer=schemas.Statistics),
                *self._model_routes(MODEL),
                *self._model_routes(VERSION),
                Route(
                    "POST",
                    "/v2/repository/index",
                    self.repository_index,
                    "The repository's models and their states",
                    body=schemas.IndexBody,
                    is_body_required=False,
                    answer=schemas.Index,
                ),
                _load_route("load", self.load, "Load a model, or load it anew"),
                _load_route("unload", self.unload, "Unload a model"),
            ],
        )

    def _model_routes(self, path: str) -> list[Route]:
        return [
            Route("GET", path, self.model_metadata, "Model metadata", answer=schemas.ModelMetadata),
            Route("GET", path + "/ready", self.model_ready, "Is the model ready?", answer=schemas.ModelReady),
            Route("GET", path + "/config", self.model_config, "Model configuration", answer=schemas.ModelConfig),
            Route("GET", path + "/stats", self.statistics, "Model statistics", answer=schemas.Statistics),
            Route(
                "POST",
                path + "/infer",
                _infer,
                "Infer",
                schemas.INFER_DESCRIPTION,
                body=schemas.InferBody,
                binary_body=BINARY,
                answer=schemas.InferAnswer,
                binary_answer=BINARY,
            ),
        ]

    async def server_metadata(self, request: Request) -> Response:
        catalogue = self._catalogue
        return json_answer(
            {"name": SERVER_NAME, "version": catalogue.server_version, "extensions": list(catalogue.extensions)}
        )

    async def live(self, request: Request) -> Response:
        return json_answer({"live": True})

    async def ready(self, request: Request) -> Response:
        if self._catalogue.is_server_ready():
            return json_answer({"ready": True})
        return json_answer({"ready": False, "error": "the server is not ready"}, 503)

    async def model_ready(self, request: Request) -> Response:
        model, version = path_names(request)
        if self._catalogue.is_model_ready(model, version):
            return json_answer({"name": model, "ready": True})
        return json_answer({"name": model, "ready": False, "error": f"model '{model}' is not ready"}, 503)

    async def model_metadata(self, request: Request) -> Response:
        model, version = path_names(request)
        block = await self._catalogue.block(model, version)
        return json_answer(model_config.as_json(model_config.metadata(block, self._catalogue.versions(model))))

    async def model_config(self, request: Request) -> Response:
        block = await self._catalogue.block(*path_names(request))
        return json_answer(model_config.as_json(model_config.model_config(block)))

    async def statistics(self, request: Request) -> Response:
        found = await self._catalogue.statistics(*path_names(request))
        return json_answer({"model_stats": [model_config.as_json(model_config.statistics(block)) for block in found]})

    async def repository_index(self, request: Request) -> Response:
        only_ready = (await self._read(request)).get("ready", False)
        if type(only_ready) is not bool:
            raise InvalidRequest("'ready' must be a boolean")
        return json_answer(
            [
                {"name": view.model, "version": view.version, "state": INDEX_STATES[view.state], "reason": view.reason}
                for view in self._catalogue.index()
                if INDEX_STATES[view.state] == READY or not only_ready
            ]
        )

    async def load(self, request: Request) -> Response:
        parameters = decode_parameters((await self._read(request)).get("parameters"))
        if refused := [name for name in parameters if name == "config" or name.startswith("file:")]:
            raise InvalidRequest(f"parameter '{refused[0][:80]}' is not supported: change the model repository instead")
        await self._catalogue.load(path_names(request)[0])
        return json_answer({})

    async def unload(self, request: Request) -> Response:
        decode_parameters((await self._read(request)).get("parameters"))
        await self._catalogue.unload(path_names(request)[0])
        return json_answer({})

    async def _read(self, request: Request) -> dict[str, object]:
        """The body's object; no body is an empty one."""
        body = await read_body(dict(request.scope["headers"]), request.receive, self._limits.max_message_bytes)
        return parse_object(body) if body else {}


async def _infer(request: Request) -> Response:
    raise InternalError("inference is answered before routing; this stands for it in the documentation")


def _load_route(verb: str, handler: Handler, summary: str) -> Route:
    path = f"/v2/repository/models/{{model}}/{verb}"
    return Route("POST", path, handler, summary, body=schemas.LoadBody, is_body_required=False, answer=schemas.Empty)
