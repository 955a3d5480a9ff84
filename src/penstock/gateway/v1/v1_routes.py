"""The routes of `/v1` for clients: OpenAI's models and embeddings, images, and plain values for any block."""

import base64
from collections.abc import Iterable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.blocks import BlockDescription
from penstock.core.config import SERVER_NAME
from penstock.core.errors import Forbidden, InvalidRequest, InvalidTensor
from penstock.core.principals import INFERENCE_SCOPES, VIEW_SCOPES, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, pack_bytes, to_array, unpack_bytes
from penstock.endpoints.http.http_message import parse_weights
from penstock.endpoints.http.openapi import Route, get_principal, make_json_answer
from penstock.gateway.blocks.packet import BlockPacket
from penstock.gateway.blocks.packet_rest import PacketRest, is_packet
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http_calls import RestCall, RestCalls, validate
from penstock.gateway.oip.rest_codec import check_counts
from penstock.gateway.v1 import v1_codec as codec
from penstock.gateway.v1 import v1_schemas as schemas
from penstock.gateway.v1.multipart import FormPart

FORM_TYPE = "multipart/form-data"
BINARY_SCHEMA = {"schema": {"type": "string", "format": "binary"}}
# Options of the answer, in the query or the form.
IMAGE_OPTIONS = {
    "format": "png, jpeg or webp (default: as `Accept` prefers, otherwise png)",
    "quality": "Quality of jpeg and webp, 1 to 100",
    "resolution": "A factor (2x), a number of lines (1080p, 4k) or a size (1920x1080)",
    "mode": "upscale or denoise",
}
IMAGE_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "jpg": "image/jpeg"}
IMAGE_FORM_SCHEMA = {
    "schema": {
        "type": "object",
        "properties": {
            "image": BINARY_SCHEMA["schema"],
            **{name: {"type": "string"} for name in ("model", *IMAGE_OPTIONS)},
        },
    }
}
INFER_FORM_SCHEMA = {"schema": {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]}}
OPTIONS = ("model", "version", "id")  # multipart fields that are not inputs


class V1Rest:
    def __init__(self, calls: RestCalls, catalogue: Catalogue, packets: PacketRest) -> None:
        self._calls = calls
        self._catalogue = catalogue
        self._packets = packets

    @Route("GET", "/v1/models", "Models that can be called", needs=VIEW_SCOPES, answer=schemas.ModelList)
    async def models(self, request: Request) -> Response:
        principal = get_principal(request)
        blocks = {block.model: block for block in self._catalogue.resolver.list_blocks(principal)}
        found = [self._resolve_name(block, principal) for _, block in sorted(blocks.items())]
        return make_json_answer({"object": "list", "data": [_describe_model(block) for block in found]})

    def _resolve_name(self, block: BlockDescription, principal: Principal) -> BlockDescription:
        """Return the block that the model's name resolves to, or `block` if the caller may not use the name."""
        try:
            return self._catalogue.resolver.resolve(block.model, "", principal)
        except Forbidden:
            return block

    @Route("GET", "/v1/models/{model}", "One model", needs=VIEW_SCOPES, answer=schemas.Model)
    async def model(self, request: Request) -> Response:
        return make_json_answer(
            _describe_model(self._catalogue.resolver.resolve(request.path_params["model"], "", get_principal(request)))
        )

    @Route(
        "POST",
        "/v1/embeddings",
        "Create embeddings, as in OpenAI's API",
        needs=INFERENCE_SCOPES,
        body=schemas.EmbeddingsBody,
        answer=schemas.EmbeddingsAnswer,
    )
    async def embeddings(self, request: Request) -> Response:
        with self._calls.count_rejections(request):
            call = await self._calls.read_call(request)
            body, tensor = await self._calls.decode_json(call, self._read_embeddings)
            block = await self._calls.find_task_block(call, body.model, "embed")
            width, wanted = block.outputs[0].shape[-1], body.dimensions
            if wanted not in (None, width):
                raise InvalidRequest(f"'dimensions' is {wanted}, but model '{body.model}' supports only {width}")
            tensor.name = block.inputs[0].name
        response = await self._calls.serve(call, InferRequest(body.model, [tensor]))
        return await self._calls.create_answer(
            call, response, lambda: _encode_embeddings(response, body.encoding_format)
        )

    def _read_embeddings(self, message: dict[str, Any]) -> tuple[schemas.EmbeddingsBody, Tensor]:
        """Return the body without its texts, and the texts as a tensor."""
        given = message.get("input")
        if isinstance(given, list):
            if any(isinstance(item, int | list) for item in given):
                raise InvalidTensor(
                    "'input' must be a string or a list of strings; token arrays are not supported: send the text"
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
        "The body is the JPEG or PNG file, or a form with the file in the field `image`. The answer is an image in "
        "the format that `format` or `Accept` requests (default: PNG).",
        needs=INFERENCE_SCOPES,
        binary_body={"image/*": BINARY_SCHEMA, "application/octet-stream": BINARY_SCHEMA, FORM_TYPE: IMAGE_FORM_SCHEMA},
        binary_answer=dict.fromkeys(IMAGE_TYPES.values(), BINARY_SCHEMA),
        query={"model": "The model; optional if only one model supports this task", **IMAGE_OPTIONS},
    )
    async def upscale(self, request: Request) -> Response:
        with self._calls.count_rejections(request):
            call = await self._calls.read_call(request)
            model, image, options = await self._read_image(call)
            block = await self._calls.find_task_block(call, model, "upscale")
            tensor = Tensor(block.inputs[0].name, BYTES, (1, 1), pack_bytes([image]))
            del image
        response = await self._calls.serve(call, InferRequest(model or block.model, [tensor], parameters={**options}))
        media_type = IMAGE_TYPES.get(options.get("format", "").strip().lower(), "image/png")
        headers = {**call.answer_headers, "vary": "Accept"}
        return Response(unpack_bytes(response.outputs[0])[0], 200, headers, media_type)

    async def _read_image(self, call: RestCall) -> tuple[str, bytes, dict[str, str]]:
        """Return the model's name or an empty string, the file, and the options of the answer."""
        query = call.request.query_params
        accepted = _choose_format(call.headers.get(b"accept", b"").decode("latin-1"))
        options = accepted | {name: query[name] for name in IMAGE_OPTIONS if name in query}
        model, image, form_options = await self._read_file(call, query.get("model", ""))
        return model, image, options | form_options

    async def _read_file(self, call: RestCall, model: str) -> tuple[str, bytes, dict[str, str]]:
        """Return the model's name, the file, and the options in the body. `model`: the name if the body has none."""
        kind = call.content_type
        if kind == FORM_TYPE:
            parts = await self._calls.read_form(call)
            model = next((_decode_text(part) for part in parts if part.name == "model"), model)
            options = {part.name: _decode_text(part) for part in parts if part.name in IMAGE_OPTIONS}
            images = [part.data for part in parts if part.name == "image"]
            if len(images) != 1:
                raise InvalidRequest("the form must have one file in the field 'image'")
            return model, images[0], options
        if kind in ("", "application/octet-stream") or kind.startswith("image/"):
            return model, call.take_body(), {}
        raise InvalidRequest(f"unsupported content-type '{kind[:80]}': send the image as image/* or as {FORM_TYPE}")

    @Route(
        "POST",
        "/v1/infer",
        "Run any block with plain values, or with a packet",
        "In a form, a file is an element of the BYTES input with its name; other fields are values. JSON without "
        "`inputs` is a packet of the block protocol.",
        needs=INFERENCE_SCOPES,
        body=schemas.V1InferRequest,
        binary_body={FORM_TYPE: INFER_FORM_SCHEMA},
        answer=schemas.V1InferResult,
    )
    async def infer(self, request: Request) -> Response:
        with self._calls.count_rejections(request):
            call = await self._calls.read_call(request)
            if call.content_type == FORM_TYPE:
                decoded: InferRequest | BlockPacket = await self._read_form(call)
                is_map = True
            else:
                decoded, is_map = await self._read_values(call)
        if isinstance(decoded, BlockPacket):
            return await self._packets.run(call, decoded)
        response = await self._calls.serve(call, decoded)
        limits = self._calls.limits
        return await self._calls.create_answer(call, response, lambda: codec.encode(response, is_map, limits))

    async def _read_values(self, call: RestCall) -> tuple[InferRequest | BlockPacket, bool]:
        """Return the request or packet, and whether its inputs are an object with their names as keys."""
        size_bytes = len(call.body)
        message = await self._calls.decode_json(call, self._read_body, or_else=f" or {FORM_TYPE}")
        if isinstance(message, BlockPacket):
            return message, False
        block = await self._catalogue.wait_for_block(message.model, message.version, call.principal)
        decoded = await self._calls.run_off_loop(size_bytes, lambda: codec.decode(message, block))
        return decoded, isinstance(message.inputs, dict)

    def _read_body(self, message: dict[str, Any]) -> schemas.V1InferBody | BlockPacket:
        if is_packet(message):
            return self._packets.read(message)
        check_counts(message, self._calls.limits)
        return validate(schemas.V1InferBody, message)

    async def _read_form(self, call: RestCall) -> InferRequest:
        size_bytes = len(call.body)
        parts = await self._calls.read_form(call)
        options = {part.name: _decode_text(part) for part in parts if part.name in OPTIONS and not part.is_file}
        block = await self._catalogue.wait_for_block(
            options.get("model", ""), options.get("version", ""), call.principal
        )
        inputs = [part for part in parts if part.name not in options]
        limits = self._calls.limits
        return await self._calls.run_off_loop(size_bytes, lambda: codec.decode_form(options, inputs, block, limits))


def _describe_model(block: BlockDescription) -> dict[str, object]:
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


def _encode_embeddings(response: InferResponse, encoding_format: str) -> dict[str, object]:
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


def _choose_format(accept: str) -> dict[str, str]:
    """Return the format option that an Accept header prefers to PNG; empty if it prefers PNG or no known format."""
    wanted = parse_weights(accept)
    rest = wanted.get("image/*", wanted.get("*/*", 0.0))
    best = max(
        IMAGE_TYPES, key=lambda name: wanted.get(IMAGE_TYPES[name], rest)
    )  # the first of equally preferred formats
    return {} if best == "png" else {"format": best}


def _decode_text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the field '{part.name[:80]}' is not UTF-8: send UTF-8 text") from error
