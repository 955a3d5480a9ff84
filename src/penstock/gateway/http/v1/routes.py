"""The routes of `/v1` for clients: what OpenAI's speak, and plain JSON or files for any block."""

import base64
from collections.abc import Iterable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.blocks import BlockDescription
from penstock.core.errors import Forbidden, InvalidRequest, InvalidTensor
from penstock.core.principals import INFERRING, SEEING, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, pack_bytes, to_array, unpack_bytes
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.http.calls import RestCall, RestCalls, validate
from penstock.gateway.http.message import weights
from penstock.gateway.http.oip.codec import check_counts
from penstock.gateway.http.openapi import Route, json_answer, principal_of
from penstock.gateway.http.v1 import codec, schemas
from penstock.gateway.http.v1.multipart import FormPart

FORM = "multipart/form-data"
BINARY = {"schema": {"type": "string", "format": "binary"}}
# What may be asked of an answer, in the query or the form; the first that a client accepts is its format else.
IMAGE_WISHES = {
    "format": "png, jpeg or webp; without it as Accept says, else png",
    "quality": "Of jpeg and webp, 1 to 100",
    "resolution": "A factor (2x), lines (1080p, 4k) or a frame (1920x1080)",
    "mode": "upscale or denoise",
}
IMAGE_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "jpg": "image/jpeg"}
IMAGE_FORM = {
    "schema": {
        "type": "object",
        "properties": {
            "image": BINARY["schema"],
            **{name: {"type": "string"} for name in ("model", *IMAGE_WISHES)},
        },
    }
}
ANY_FORM = {"schema": {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]}}
OPTIONS = ("model", "version", "id")  # multipart fields that are no inputs


class OpenAiRest:
    def __init__(self, calls: RestCalls, catalogue: Catalogue) -> None:
        self._calls = calls
        self._catalogue = catalogue

    @Route("GET", "/v1/models", "Models that can be called", needs=SEEING, answer=schemas.ModelList)
    async def models(self, request: Request) -> Response:
        principal = principal_of(request)
        blocks = {block.model: block for block in self._catalogue.resolver.blocks(principal)}
        found = [self._answering(block, principal) for _, block in sorted(blocks.items())]
        return json_answer({"object": "list", "data": [_card(block) for block in found]})

    def _answering(self, block: BlockDescription, principal: Principal) -> BlockDescription:
        """What answers for its model's name; itself to who may not ask that."""
        try:
            return self._catalogue.resolver.resolve(block.model, "", principal)
        except Forbidden:
            return block

    @Route("GET", "/v1/models/{model}", "One model", needs=SEEING, answer=schemas.Model)
    async def model(self, request: Request) -> Response:
        return json_answer(
            _card(self._catalogue.resolver.resolve(request.path_params["model"], "", principal_of(request)))
        )

    @Route(
        "POST",
        "/v1/embeddings",
        "Texts to vectors, as OpenAI's API",
        needs=INFERRING,
        body=schemas.EmbeddingsBody,
        answer=schemas.EmbeddingsAnswer,
    )
    async def embeddings(self, request: Request) -> Response:
        with self._calls.turning_away():
            call = await self._calls.read(request)
            body, tensor = await self._calls.json(call, self._read_embeddings)
            block = await self._calls.task_block(call, body.model, "embed")
            width, wanted = block.outputs[0].shape[-1], body.dimensions
            if wanted not in (None, width):
                raise InvalidRequest(f"'dimensions' is {wanted}; model '{body.model}' gives {width} and no other")
            tensor.name = block.inputs[0].name
        response = await self._calls.serve(call, InferRequest(body.model, [tensor]))
        return await self._calls.answer(call, response, lambda: _embeddings(response, body.encoding_format))

    def _read_embeddings(self, message: dict[str, Any]) -> tuple[schemas.EmbeddingsBody, Tensor]:
        """What is asked for, without its texts, and these."""
        given = message.get("input")
        if isinstance(given, list):
            if any(isinstance(item, int | list) for item in given):
                raise InvalidTensor(
                    "'input' must be a string or a list of strings; token arrays are not taken: send the text"
                )
            self._calls.check_texts("input", given)
        body = validate(schemas.EmbeddingsBody, message)
        texts = [body.input] if isinstance(body.input, str) else body.input
        body.input = ""
        return body, Tensor("", BYTES, (len(texts),), pack_bytes(texts))

    @Route(
        "POST",
        "/v1/images/upscale",
        "Enlarge a photograph",
        "The body is the JPEG or PNG file, or a form with the file in `image`. The answer is a PNG file, or what "
        "`format` or `Accept` asks for.",
        needs=INFERRING,
        binary_body={"image/*": BINARY, "application/octet-stream": BINARY, FORM: IMAGE_FORM},
        binary_answer=dict.fromkeys(IMAGE_TYPES.values(), BINARY),
        query={"model": "The block's model; may be left out where only one fits", **IMAGE_WISHES},
    )
    async def upscale(self, request: Request) -> Response:
        with self._calls.turning_away():
            call = await self._calls.read(request)
            model, image, wishes = await self._read_image(call)
            block = await self._calls.task_block(call, model, "upscale")
            tensor = Tensor(block.inputs[0].name, BYTES, (1, 1), pack_bytes([image]))
            del image
        response = await self._calls.serve(call, InferRequest(model or block.model, [tensor], parameters={**wishes}))
        media_type = IMAGE_TYPES.get(wishes.get("format", "").strip().lower(), "image/png")
        headers = {**call.answer_headers, "vary": "Accept"}
        return Response(unpack_bytes(response.outputs[0])[0], 200, headers, media_type)

    async def _read_image(self, call: RestCall) -> tuple[str, bytes, dict[str, str]]:
        """The model's name, where one is given, the file, and what is asked of the answer."""
        query = call.request.query_params
        accepted = _accepted(call.headers.get(b"accept", b"").decode("latin-1"))
        wishes = accepted | {name: query[name] for name in IMAGE_WISHES if name in query}
        model, image, told = await self._read_file(call, query.get("model", ""))
        return model, image, wishes | told

    async def _read_file(self, call: RestCall, model: str) -> tuple[str, bytes, dict[str, str]]:
        """The same; of the answer, what the body asks."""
        kind = call.content_type
        if kind == FORM:
            parts = await self._calls.form(call)
            model = next((_text(part) for part in parts if part.name == "model"), model)
            told = {part.name: _text(part) for part in parts if part.name in IMAGE_WISHES}
            images = [part.data for part in parts if part.name == "image"]
            if len(images) != 1:
                raise InvalidRequest("the form must have one file in the field 'image'")
            return model, images[0], told
        if kind in ("", "application/octet-stream") or kind.startswith("image/"):
            return model, call.take_body(), {}
        raise InvalidRequest(f"content-type '{kind[:80]}': send the image itself as image/*, or {FORM}")

    @Route(
        "POST",
        "/v1/infer",
        "Any block, with plain values",
        "As a form, files are elements of the BYTES input of their name, and other fields are values.",
        needs=INFERRING,
        body=schemas.V1InferBody,
        binary_body={FORM: ANY_FORM},
        answer=schemas.V1InferAnswer,
    )
    async def infer(self, request: Request) -> Response:
        with self._calls.turning_away():
            call = await self._calls.read(request)
            if call.content_type == FORM:
                decoded, is_map = await self._read_form(call), True
            else:
                decoded, is_map = await self._read_values(call)
        response = await self._calls.serve(call, decoded)
        limits = self._calls.limits
        return await self._calls.answer(call, response, lambda: codec.encode(response, is_map, limits))

    async def _read_values(self, call: RestCall) -> tuple[InferRequest, bool]:
        """The request, and whether its inputs are named by their keys."""
        size_bytes = len(call.body)
        message = await self._calls.json(call, self._read_body, or_else=f" or {FORM}")
        block = await self._catalogue.block(message.model, message.version, call.principal)
        decoded = await self._calls.off_loop(size_bytes, lambda: codec.decode(message, block))
        return decoded, isinstance(message.inputs, dict)

    def _read_body(self, message: dict[str, Any]) -> schemas.V1InferBody:
        check_counts(message, self._calls.limits)
        return validate(schemas.V1InferBody, message)

    async def _read_form(self, call: RestCall) -> InferRequest:
        size_bytes = len(call.body)
        parts = await self._calls.form(call)
        options = {part.name: _text(part) for part in parts if part.name in OPTIONS and not part.is_file}
        block = await self._catalogue.block(options.get("model", ""), options.get("version", ""), call.principal)
        inputs = [part for part in parts if part.name not in options]
        limits = self._calls.limits
        return await self._calls.off_loop(size_bytes, lambda: codec.decode_form(options, inputs, block, limits))


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


def _accepted(accept: str) -> dict[str, str]:
    """The format that a client would rather have than a PNG file; an Accept that names none of ours is no wish."""
    wanted = weights(accept)
    rest = wanted.get("image/*", wanted.get("*/*", 0.0))
    best = max(IMAGE_TYPES, key=lambda name: wanted.get(IMAGE_TYPES[name], rest))  # the first of the like ones
    return {} if best == "png" else {"format": best}


def _text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the field '{part.name[:80]}' is not UTF-8") from error
