"""Triton's generate extension: one flat JSON object per request, answered whole or as server-sent events."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.principals import INFERENCE_SCOPES
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, TensorSpec
from penstock.endpoints import statuses
from penstock.endpoints.http import schemas
from penstock.endpoints.http.event_stream import EVENT_STREAM, EventStream, encode_json_event
from penstock.endpoints.http.openapi import SCHEMA_REFERENCE, Route, read_path_names
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http_calls import RestCall, RestCalls
from penstock.gateway.oip.json_tensors import fill_shape, flatten, is_structured, pack_elements, to_json_data
from penstock.gateway.oip.rest_codec import LIMITS, MAX_ID, check_counts, decode_parameters

EVENTS_SCHEMA = {EVENT_STREAM: {"schema": {"$ref": SCHEMA_REFERENCE.format(model="GenerateAnswer")}}}
PARAMETERS = "parameters"
ID = "id"


def decode_generate(message: dict[str, Any], block: BlockDescription, limits: Limits = LIMITS) -> InferRequest:
    """Return the request. Keys that name an input are inputs, also under `parameters`; other keys are parameters."""
    specs = {spec.name: spec for spec in block.inputs}
    request_id = "" if ID in specs else message.pop(ID, "")
    if type(request_id) is not str or len(request_id) > MAX_ID:
        raise InvalidRequest(f"'{ID}' must be a string of at most {MAX_ID} characters")
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    for name, value in _iterate_entries(message):
        if name in tensors or name in parameters:
            raise InvalidRequest(f"'{name[:80]}' is given twice: in '{PARAMETERS}' and outside of it")
        if value is None:
            continue
        if name in specs:
            tensors[name] = _to_tensor(specs[name], value)
        else:
            parameters[name] = _to_json_text(value) if isinstance(value, list | dict) else value
    check_counts({"inputs": list(tensors), PARAMETERS: parameters}, limits)
    return InferRequest(
        block.model, list(tensors.values()), request_id=request_id, parameters=decode_parameters(parameters)
    )


def encode_generate(response: InferResponse, has_id: bool, limits: Limits = LIMITS) -> dict[str, Any]:
    """Return the JSON of an answer. `has_id`: include the request's id."""
    header: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if has_id:
        header[ID] = response.request_id
    outputs = {tensor.name: _to_json_value(tensor, limits.max_values) for tensor in response.outputs}
    return {**response.parameters, **header, **outputs}


def _iterate_entries(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in message.items():
        if name != PARAMETERS:
            yield name, value
        elif isinstance(value, dict):
            yield from value.items()
        elif value is not None:
            raise InvalidRequest(f"'{PARAMETERS}' must be an object")


def _to_tensor(spec: TensorSpec, value: Any) -> Tensor:
    if spec.datatype == BYTES and is_structured(value):
        value = _to_json_text(value)  # for example the messages of a chat, which are one element
    flat, lengths = flatten(spec.name, value) if isinstance(value, list) else ([value], (1,))
    shape = lengths if len(lengths) > 1 else fill_shape(spec, len(flat))
    return Tensor(spec.name, spec.datatype, shape, pack_elements(spec.name, spec.datatype, flat))


def _to_json_text(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"an object cannot be converted to JSON text: {error}") from error


def _to_json_value(tensor: Tensor, max_values: int) -> Any:
    """Return a tensor as a flat list; a tensor with one element as a plain value."""
    found = to_json_data(tensor, max_values)
    if len(found) != 1:
        return found
    return found[0] if tensor.datatype == BYTES else found[0].item()


def _make_paths(action: str) -> tuple[str, str]:
    return f"/v2/models/{{model}}/{action}", f"/v2/models/{{model}}/versions/{{version}}/{action}"


class GenerateRest:
    def __init__(self, calls: RestCalls, catalogue: Catalogue) -> None:
        self._calls = calls
        self._catalogue = catalogue

    @Route(
        "POST",
        _make_paths("generate"),
        "Generate, and return one answer",
        schemas.GENERATE_DESCRIPTION,
        needs=INFERENCE_SCOPES,
        body=schemas.GenerateBody,
        answer=schemas.GenerateAnswer,
    )
    async def generate(self, request: Request) -> Response:
        call, decoded, is_decoupled = await self._read_call(request)
        has_id = bool(decoded.request_id)
        response = await (self._serve_single(call, decoded) if is_decoupled else self._calls.serve(call, decoded))
        return await self._calls.create_answer(
            call, response, lambda: encode_generate(response, has_id, self._calls.limits)
        )

    @Route(
        "POST",
        _make_paths("generate_stream"),
        "Generate, and stream the answer",
        "Like `generate`. Each event has the output since the previous one. A later error is sent as an event.",
        needs=INFERENCE_SCOPES,
        body=schemas.GenerateBody,
        binary_answer=EVENTS_SCHEMA,
    )
    async def generate_stream(self, request: Request) -> Response:
        call, decoded, _ = await self._read_call(request)
        return EventStream(self._encode_events(call, decoded), _encode_error_event, lambda: call.answer_headers)

    async def _read_call(self, request: Request) -> tuple[RestCall, InferRequest, bool]:
        """Return the call, its request, and whether its model may give several answers."""
        model, version = read_path_names(request)
        with self._calls.count_rejections(request):
            call = await self._calls.read_call(request)
            block = await self._catalogue.wait_for_block(model, version, call.principal)
            decode = partial(decode_generate, block=block, limits=self._calls.limits)
            decoded = await self._calls.read_json(call, decode)
        decoded.model, decoded.version = model, version
        return call, decoded, block.settings.is_decoupled

    async def _serve_single(self, call: RestCall, request: InferRequest) -> InferResponse:
        """Return the only answer of a model that may give several; raise InvalidRequest for no or several answers."""
        found: InferResponse | None = None
        with self._calls.watch_disconnect(call):
            async with aclosing(self._calls.stream(call, request)) as responses:
                async for response in responses:
                    if response.outputs and found is not None:
                        raise InvalidRequest(f"model '{request.model}' gives several answers: use generate_stream")
                    found = response if response.outputs else found
        if found is None:
            raise InvalidRequest(f"model '{request.model}' gave no answer: use generate_stream, which allows that")
        return found

    async def _encode_events(self, call: RestCall, request: InferRequest) -> AsyncGenerator[bytes, None]:
        has_id = bool(request.request_id)
        async with aclosing(self._calls.stream(call, request)) as responses:
            async for response in responses:
                if response.outputs:
                    yield encode_json_event(encode_generate(response, has_id, self._calls.limits))


def _encode_error_event(error: PenstockError) -> bytes:
    return encode_json_event({"error": statuses.make_public_message(error)})
