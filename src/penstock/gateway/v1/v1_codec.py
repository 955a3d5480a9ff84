"""The codec of `/v1/infer`: plain JSON values to and from the request; the model's specification gives their types."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidTensor
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, TensorSpec, to_array
from penstock.endpoints.http.http_message import parse_json
from penstock.gateway.http_calls import validate
from penstock.gateway.oip.json_tensors import (
    HALF_PRECISION_DATATYPES,
    check_elements,
    flatten,
    pack_elements,
    to_json_array,
)
from penstock.gateway.oip.rest_codec import LIMITS, decode_inputs, decode_parameters, encode_output
from penstock.gateway.v1.multipart import FormPart
from penstock.gateway.v1.v1_schemas import V1InferBody

B64 = "b64"


def decode(message: V1InferBody, block: BlockDescription) -> InferRequest:
    if isinstance(message.inputs, dict):
        specs = {spec.name: spec for spec in block.inputs}
        tensors = [make_tensor(find_spec(specs, name), value) for name, value in message.inputs.items()]
    else:
        tensors, _ = decode_inputs(message.inputs)
    return InferRequest(
        message.model,
        tensors,
        message.version,
        message.id,
        list(message.outputs),
        decode_parameters(message.parameters),
    )


def decode_form(
    options: Mapping[str, str], parts: Sequence[FormPart], block: BlockDescription, limits: Limits
) -> InferRequest:
    return decode(validate(V1InferBody, {**options, "inputs": read_form_inputs(block, parts, limits)}), block)


def read_form_inputs(block: BlockDescription, parts: Sequence[FormPart], limits: Limits = LIMITS) -> dict[str, Any]:
    """Return the inputs of a form. Files and fields of BYTES inputs are elements; other fields are JSON values."""
    specs = {spec.name: spec for spec in block.inputs}
    values: dict[str, Any] = {}
    for part in parts:
        if part.is_file or find_spec(specs, part.name).datatype == BYTES:
            values.setdefault(part.name, []).append(part.data)
        elif part.name in values:
            raise InvalidTensor(f"input '{part.name[:80]}' is given twice: send it once")
        else:
            values[part.name] = parse_json(part.data, limits)
    return values


def encode(response: InferResponse, is_map: bool, limits: Limits = LIMITS) -> dict[str, Any]:
    found: dict[str, Any] = {"model": response.model, "version": response.version, "id": response.request_id}
    if response.parameters:
        found["parameters"] = response.parameters
    if is_map:
        found["outputs"] = {tensor.name: to_plain_value(tensor, limits.max_values) for tensor in response.outputs}
    else:
        found["outputs"] = [encode_output(tensor, limits.max_values) for tensor in response.outputs]
    return found


def find_spec(specs: dict[str, TensorSpec], name: str) -> TensorSpec:
    spec = specs.get(name)
    if spec is None:
        raise InvalidTensor(f"unknown input '{name[:80]}'; the model takes {', '.join(specs)}")
    return spec


def make_tensor(spec: TensorSpec, value: Any) -> Tensor:
    """Return the tensor of a plain value: a scalar, nested lists, or {"b64": …} for bytes."""
    if isinstance(value, list):
        flat, lengths = flatten(spec.name, value)
        missing = spec.shape[len(lengths) :]
        shape = lengths + missing if set(missing) <= {1} else lengths
    else:
        flat, shape = [value], (1,) * len(spec.shape)
    if spec.datatype == BYTES:
        flat = [_decode_element(spec.name, item) for item in flat]
    return Tensor(spec.name, spec.datatype, shape, pack_elements(spec.name, spec.datatype, flat))


def _decode_element(name: str, item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    encoded = item.get(B64)
    if len(item) != 1 or not isinstance(encoded, str):
        raise InvalidTensor(f"an element of input '{name}' is an object other than {{'{B64}': …}}")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidTensor(f"an element of input '{name}' is not base64: {error}") from error


def to_plain_value(tensor: Tensor, max_values: int) -> Any:
    """Return the tensor as nested lists; raise InvalidRequest if JSON cannot hold the values."""
    check_elements(tensor, max_values)
    if tensor.datatype == BYTES:
        elements = to_array(tensor)
        values = np.empty(elements.shape, dtype=object)
        values.ravel()[:] = [_encode_element(element) for element in elements.flat]
        return values.tolist()
    if tensor.datatype in HALF_PRECISION_DATATYPES:
        wide = to_array(tensor).astype(np.float32)
        tensor = Tensor(tensor.name, "FP32", tensor.shape, wide.tobytes())
    array = to_json_array(tensor)
    return array.reshape(tensor.shape) if tensor.shape else array[0].item()


def _encode_element(element: bytes) -> str | dict[str, str]:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {B64: base64.b64encode(element).decode()}
