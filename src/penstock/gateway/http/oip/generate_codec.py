"""The codec of Triton's generate extension: one flat JSON object to and from the request; the model says what its keys
are."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, TensorSpec
from penstock.gateway.http.json_tensors import flatten, json_data, pack_elements
from penstock.gateway.http.oip.codec import LIMITS, MAX_ID, check_counts, decode_parameters

PARAMETERS = "parameters"
ID = "id"


def decode_generate(message: dict[str, Any], block: BlockDescription, limits: Limits = LIMITS) -> InferRequest:
    """Keys that the model has as inputs are inputs, also under `parameters`; others are parameters."""
    specs = {spec.name: spec for spec in block.inputs}
    request_id = "" if ID in specs else message.pop(ID, "")
    if type(request_id) is not str or len(request_id) > MAX_ID:
        raise InvalidRequest(f"'{ID}' must be a string of at most {MAX_ID} characters")
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    for name, value in _entries(message):
        if name in tensors or name in parameters:
            raise InvalidRequest(f"'{name[:80]}' is given twice: beside '{PARAMETERS}' and in it")
        if value is None:
            continue
        if name in specs:
            tensors[name] = _tensor(specs[name], value)
        else:
            parameters[name] = _text(value) if isinstance(value, list | dict) else value
    check_counts({"inputs": list(tensors), PARAMETERS: parameters}, limits)
    return InferRequest(
        block.model, list(tensors.values()), request_id=request_id, parameters=decode_parameters(parameters)
    )


def encode_generate(response: InferResponse, has_id: bool, limits: Limits = LIMITS) -> dict[str, Any]:
    """With `has_id` the request's own."""
    told: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if has_id:
        told[ID] = response.request_id
    outputs = {tensor.name: _value(tensor, limits.max_values) for tensor in response.outputs}
    return {**response.parameters, **told, **outputs}


def _entries(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in message.items():
        if name != PARAMETERS:
            yield name, value
        elif isinstance(value, dict):
            yield from value.items()
        elif value is not None:
            raise InvalidRequest(f"'{PARAMETERS}' must be an object")


def _tensor(spec: TensorSpec, value: Any) -> Tensor:
    if spec.datatype == BYTES and _is_structured(value):
        value = _text(value)  # such as messages of a chat, which are one element
    flat, lengths = flatten(spec.name, value) if isinstance(value, list) else ([value], (1,))
    shape = lengths if len(lengths) > 1 else _shape(spec, len(flat))
    return Tensor(spec.name, spec.datatype, shape, pack_elements(spec.name, spec.datatype, flat))


def _is_structured(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value))


def _shape(spec: TensorSpec, count: int) -> tuple[int, ...]:
    """As Triton does it: the innermost open dimension takes all elements that the fixed ones leave."""
    shape = list(spec.shape)
    fixed = prod(size for size in shape if size >= 0)
    left, rest = divmod(count, fixed) if fixed else (0, count)
    for place in reversed(range(len(shape))):
        if shape[place] < 0:
            shape[place], left = left, 1
    if rest or left != 1:
        raise InvalidTensor(f"input '{spec.name}' has {count} elements, which do not fill {list(spec.shape)}")
    return tuple(shape)


def _text(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"an object cannot be passed on as JSON text: {error}") from error


def _value(tensor: Tensor, max_values: int) -> Any:
    """One element as itself, others as a flat list."""
    found = json_data(tensor, max_values)
    if len(found) != 1:
        return found
    return found[0] if tensor.datatype == BYTES else found[0].item()
