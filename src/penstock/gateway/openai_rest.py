"""Friendly REST: what OpenAI's clients speak, and plain JSON or files for any block."""

import base64
import uuid
from typing import TypeVar

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, InvalidTensor, UnknownModel
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, pack_bytes, to_array, unpack_bytes
from penstock.gateway import friendly_codec, http_message, schemas
from penstock.gateway.attendance import serve_attended
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.http_message import Headers, content_type, parse_object, read_body
from penstock.gateway.multipart import Part, parse_multipart
from penstock.gateway.openapi import Route, add_routes, json_answer
from penstock.serving.serve import Serving

Body = TypeVar("Body", bound=BaseModel)
FORM = "multipart/form-data"
BINARY = {"schema": {"type": "string", "format": "binary"}}
MODEL_QUERY = {"model": "The block's model; may be left out where only one fits"}
OPTIONS = ("model", "version", "id")  # multipart fields that are no inputs


class OpenAiRest:
    def __init__(self, serving: Serving, catalogue: Catalogue, limits: Limits) -> None:
        self._serving = serving
        self._catalogue = catalogue
        self._limits = limits

    def router(self) -> APIRouter:
        file_form = {
            "schema": {"type": "object", "properties": {"image": BINARY["schema"], "model": {"type": "string"}}}
        }
        any_form = {"schema": {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]}}
        return add_routes(
            "Friendly REST",
            [
                Route("GET", "/v1/models", self.models, "Models that can be called", answer=schemas.ModelList),
                Route("GET", "/v1/models/{model}", self.model, "One model", answer=schemas.Model),
                Route(
                    "POST",
                    "/v1/embeddings",
                    self.embeddings,
                    "Texts to vectors, as OpenAI's API",
                    body=schemas.EmbeddingsBody,
                    answer=schemas.EmbeddingsAnswer,
                ),
                Route(
                    "POST",
                    "/v1/images/upscale",
                    self.upscale,
                    "Enlarge a photograph",
                    "The body is the JPEG or PNG file, or a form with the file in `image`. The answer is a PNG file.",
                    binary_body={"image/*": BINARY, "application/octet-stream": BINARY, FORM: file_form},
                    binary_answer={"image/png": BINARY},
                    query=MODEL_QUERY,
                ),
                Route(
                    "POST",
                    "/v1/infer",
                    self.infer,
                    "Any block, with plain values",
                    "As a form, files are elements of the BYTES input of their name, and other fields are values.",
                    body=schemas.FriendlyBody,
                    binary_body={FORM: any_form},
                    answer=schemas.FriendlyAnswer,
                ),
            ],
            schemas.OpenAiError,
        )

    async def models(self, request: Request) -> Response:
        names = sorted({block.model for block in self._catalogue.blocks()})
        return json_answer({"object": "list", "data": [_card(self._catalogue.known(name, "")) for name in names]})

    async def model(self, request: Request) -> Response:
        return json_answer(_card(self._catalogue.known(request.path_params["model"], "")))

    async def embeddings(self, request: Request) -> Response:
        call = await self._read(request)
        if call.content_type not in ("", "application/json"):
            raise InvalidRequest(f"content-type '{call.content_type[:80]}': send application/json")
        message = parse_object(call.body)
        _refuse_tokens(message.get("input"))
        body = _validate(schemas.EmbeddingsBody, message)
        block = await self._task_block(body.model, "embed")
        width = block.outputs[0].shape[-1]
        if body.dimensions not in (None, width):
            raise InvalidRequest(f"'dimensions' is {body.dimensions}; model '{body.model}' gives {width} and no other")
        texts = [body.input] if isinstance(body.input, str) else body.input
        tensor = Tensor(block.inputs[0].name, BYTES, (len(texts),), pack_bytes(texts))
        response = await self._serve(call, InferRequest(body.model, [tensor]))
        return json_answer(_embeddings(response, body.encoding_format), headers=call.answer_headers)

    async def upscale(self, request: Request) -> Response:
        call = await self._read(request)
        model = request.query_params.get("model", "")
        kind = call.content_type
        if kind == FORM:
            parts = parse_multipart(call.headers[b"content-type"], call.body)
            model = next((_text(part) for part in parts if part.name == "model"), model)
            images = [part.data for part in parts if part.name == "image"]
            if len(images) != 1:
                raise InvalidRequest("the form must have one file in the field 'image'")
            image = images[0]
        elif kind in ("", "application/octet-stream") or kind.startswith("image/"):
            image = call.body
        else:
            raise InvalidRequest(f"content-type '{kind[:80]}': send the image itself as image/*, or {FORM}")
        block = await self._task_block(model, "upscale")
        tensor = Tensor(block.inputs[0].name, BYTES, (1, 1), pack_bytes([image]))
        response = await self._serve(call, InferRequest(block.model, [tensor]))
        return Response(unpack_bytes(response.outputs[0])[0], 200, call.answer_headers, "image/png")

    async def infer(self, request: Request) -> Response:
        call = await self._read(request)
        if call.content_type == FORM:
            message = await self._from_form(parse_multipart(call.headers[b"content-type"], call.body))
        elif call.content_type in ("", "application/json"):
            message = _validate(schemas.FriendlyBody, parse_object(call.body))
        else:
            raise InvalidRequest(f"content-type '{call.content_type[:80]}': send application/json or {FORM}")
        block = await self._catalogue.block(message.model, message.version)
        decoded = friendly_codec.decode(message, block)
        response = await self._serve(call, decoded)
        is_map = isinstance(message.inputs, dict)
        return json_answer(friendly_codec.encode(response, is_map), headers=call.answer_headers)

    async def _from_form(self, parts: list[Part]) -> schemas.FriendlyBody:
        options = {part.name: _text(part) for part in parts if part.name in OPTIONS and not part.is_file}
        block = await self._catalogue.block(options.get("model", ""), options.get("version", ""))
        return _validate(
            schemas.FriendlyBody,
            {**options, "inputs": friendly_codec.form_inputs(block, [p for p in parts if p.name not in options])},
        )

    async def _read(self, request: Request) -> "_Call":
        headers: Headers = dict(request.scope["headers"])
        body = await read_body(headers, request.receive, self._limits.max_message_bytes)
        return _Call(request, headers, body)

    async def _serve(self, call: "_Call", request: InferRequest) -> InferResponse:
        request.request_id = call.request_id = request.request_id or call.request_id
        request.protocol = "rest"
        request.timeout_s = http_message.timeout_s(call.headers)
        request.traceparent = http_message.traceparent(call.headers)
        request.size_bytes = sum(len(tensor.data) for tensor in request.inputs)
        return await serve_attended(self._serving, request, call.request.receive)

    async def _task_block(self, model: str, task: str) -> BlockDescription:
        """The named model if it does the task; without a name, the only one that does."""
        if model:
            block = await self._catalogue.block(model, "")
            if block.settings.task != task:
                raise InvalidRequest(f"model '{model}' does '{block.settings.task}', not '{task}'")
            return block
        names = sorted({block.model for block in self._catalogue.blocks() if block.settings.task == task})
        if len(names) != 1:
            raise UnknownModel(f"'model' must name one of: {', '.join(names) or 'none is ready'}")
        return await self._catalogue.block(names[0], "")


class _Call:
    """One request to these routes: its headers, its body and its id."""

    def __init__(self, request: Request, headers: Headers, body: bytes) -> None:
        self.request = request
        self.headers = headers
        self.body = body
        self.content_type = content_type(headers)
        self.request_id = http_message.request_id(headers) or uuid.uuid4().hex
        request.state.request_id = self.request_id  # for errors, which are answered elsewhere

    @property
    def answer_headers(self) -> dict[str, str]:
        # An id from the body may hold what no header may.
        is_plain = http_message.PRINTABLE.fullmatch(self.request_id.encode()) is not None
        return {"x-request-id": self.request_id} if is_plain else {}


def _card(block: BlockDescription) -> dict[str, object]:
    return {
        "id": block.model,
        "object": "model",
        "created": 0,
        "owned_by": SERVER_NAME,
        "task": block.settings.task,
        "version": block.version,
        "block_id": block.block_id,
        "description": block.settings.description,
        "tags": list(block.settings.tags),
    }


def _embeddings(response: InferResponse, encoding_format: str) -> dict[str, object]:
    vectors = to_array(response.outputs[0])
    tokens = response.parameters.get("tokens", 0)
    encode = _base64 if encoding_format == "base64" else np.asarray
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ],
        "model": response.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _refuse_tokens(given: object) -> None:
    if isinstance(given, list) and any(isinstance(item, int | list) for item in given):
        raise InvalidTensor("'input' must be a string or a list of strings; token arrays are not taken: send the text")


def _text(part: Part) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the field '{part.name[:80]}' is not UTF-8") from error


def _validate(model: type[Body], message: dict[str, object]) -> Body:
    try:
        return model.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"'{where[:80]}': {first['msg']}") from error
