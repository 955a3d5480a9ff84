"""The routes of `/v1` for clients: what OpenAI's speak, and plain JSON or files for any block."""

import base64
from collections.abc import Iterable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, pack_bytes, to_array, unpack_bytes
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.http.calls import RestCalls, validate
from penstock.gateway.http.openapi import Route, json_answer
from penstock.gateway.http.v1 import codec, schemas
from penstock.gateway.http.v1.multipart import FormPart, parse_multipart

FORM = "multipart/form-data"
BINARY = {"schema": {"type": "string", "format": "binary"}}
IMAGE_FORM = {"schema": {"type": "object", "properties": {"image": BINARY["schema"], "model": {"type": "string"}}}}
ANY_FORM = {"schema": {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]}}
OPTIONS = ("model", "version", "id")  # multipart fields that are no inputs


class OpenAiRest:
    def __init__(self, calls: RestCalls, catalogue: Catalogue) -> None:
        self._calls = calls
        self._catalogue = catalogue

    @Route("GET", "/v1/models", "Models that can be called", answer=schemas.ModelList)
    async def models(self, request: Request) -> Response:
        names = sorted({block.model for block in self._catalogue.resolver.blocks()})
        return json_answer(
            {"object": "list", "data": [_card(self._catalogue.resolver.resolve(name, "")) for name in names]}
        )

    @Route("GET", "/v1/models/{model}", "One model", answer=schemas.Model)
    async def model(self, request: Request) -> Response:
        return json_answer(_card(self._catalogue.resolver.resolve(request.path_params["model"], "")))

    @Route(
        "POST",
        "/v1/embeddings",
        "Texts to vectors, as OpenAI's API",
        body=schemas.EmbeddingsBody,
        answer=schemas.EmbeddingsAnswer,
    )
    async def embeddings(self, request: Request) -> Response:
        call = await self._calls.read(request)
        message = call.json()
        given = message.get("input")
        if isinstance(given, list) and any(isinstance(item, int | list) for item in given):
            raise InvalidTensor(
                "'input' must be a string or a list of strings; token arrays are not taken: send the text"
            )
        body = validate(schemas.EmbeddingsBody, message)
        block = await self._calls.task_block(body.model, "embed")
        width = block.outputs[0].shape[-1]
        if body.dimensions not in (None, width):
            raise InvalidRequest(f"'dimensions' is {body.dimensions}; model '{body.model}' gives {width} and no other")
        texts = [body.input] if isinstance(body.input, str) else body.input
        tensor = Tensor(block.inputs[0].name, BYTES, (len(texts),), pack_bytes(texts))
        response = await self._calls.serve(call, InferRequest(body.model, [tensor]))
        return json_answer(_embeddings(response, body.encoding_format), headers=call.answer_headers)

    @Route(
        "POST",
        "/v1/images/upscale",
        "Enlarge a photograph",
        "The body is the JPEG or PNG file, or a form with the file in `image`. The answer is a PNG file.",
        binary_body={"image/*": BINARY, "application/octet-stream": BINARY, FORM: IMAGE_FORM},
        binary_answer={"image/png": BINARY},
        query={"model": "The block's model; may be left out where only one fits"},
    )
    async def upscale(self, request: Request) -> Response:
        call = await self._calls.read(request)
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
        block = await self._calls.task_block(model, "upscale")
        tensor = Tensor(block.inputs[0].name, BYTES, (1, 1), pack_bytes([image]))
        response = await self._calls.serve(call, InferRequest(block.model, [tensor]))
        return Response(unpack_bytes(response.outputs[0])[0], 200, call.answer_headers, "image/png")

    @Route(
        "POST",
        "/v1/infer",
        "Any block, with plain values",
        "As a form, files are elements of the BYTES input of their name, and other fields are values.",
        body=schemas.V1InferBody,
        binary_body={FORM: ANY_FORM},
        answer=schemas.V1InferAnswer,
    )
    async def infer(self, request: Request) -> Response:
        call = await self._calls.read(request)
        if call.content_type == FORM:
            message = await self._from_form(parse_multipart(call.headers[b"content-type"], call.body))
        else:
            message = validate(schemas.V1InferBody, call.json(or_else=f" or {FORM}"))
        block = await self._catalogue.block(message.model, message.version)
        decoded = codec.decode(message, block)
        response = await self._calls.serve(call, decoded)
        is_map = isinstance(message.inputs, dict)
        return json_answer(codec.encode(response, is_map), headers=call.answer_headers)

    async def _from_form(self, parts: list[FormPart]) -> schemas.V1InferBody:
        options = {part.name: _text(part) for part in parts if part.name in OPTIONS and not part.is_file}
        block = await self._catalogue.block(options.get("model", ""), options.get("version", ""))
        return validate(
            schemas.V1InferBody,
            {**options, "inputs": codec.form_inputs(block, [p for p in parts if p.name not in options])},
        )


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
    vectors: Iterable[Any] = to_array(response.outputs[0])
    tokens = response.parameters.get("tokens", 0)
    if encoding_format == "base64":
        vectors = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": found} for index, found in enumerate(vectors)],
        "model": response.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the field '{part.name[:80]}' is not UTF-8") from error
