"""The codec of REST: the Open Inference Protocol's JSON, and binary tensors after it, to and from the request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.requests import InferRequest, InferResponse, Parameter
from penstock.core.tensors import BYTES, ITEM_SIZES, Buffer, Tensor, check_tensor, pack_bytes
from penstock.endpoints.http.http_message import parse_object
from penstock.endpoints.large_messages import LARGE_BYTES
from penstock.gateway.oip.json_tensors import ELEMENT_TYPES, check_shape, pack_list, to_json_data
from penstock.gateway.shared_memory.region import REGION, RegionPlace, RegionTarget, Targets, read_place
from penstock.gateway.shared_memory.regions import SharedMemory, require_memory

MAX_NAME = 256
MAX_ID = 1024
MAX_PARAMETER_CHARACTERS = 1024 * 1024
LIMITS = Limits()  # the defaults
JSON_CONTAINERS = (list, dict)  # JSON values that have a length
NO_BYTES = memoryview(b"")
MAX_CACHED, MAX_CACHED_BYTES = 256, 1024  # JSON headers in the cache, and the size of each


@dataclass(slots=True)
class OutputForm:
    """The form of an answer: the outputs sent as bytes after the JSON, and those written to shared memory."""

    is_binary: bool = False  # for outputs that are not in `by_name`
    by_name: dict[str, bool] = field(default_factory=dict)
    targets: Targets | None = None


def decode_infer(
    header: Buffer, binary: memoryview = NO_BYTES, memory: SharedMemory | None = None, limits: Limits = LIMITS
) -> tuple[InferRequest, OutputForm]:
    """Return the request and the form of its answer. The caller sets the request's model, version and protocol."""
    message = parse_object(header, limits)
    inputs, parameters = message.get("inputs"), message.get("parameters")
    check_counts(message, limits)
    tensors, size_bytes = decode_inputs(inputs, binary, memory)
    parameters = decode_parameters(parameters)
    form = OutputForm(_pop_flag(parameters, "binary_data_output"))
    outputs = _decode_outputs(message.get("outputs"), form, memory)
    request_id = message.get("id", "")
    if type(request_id) is not str or len(request_id) > MAX_ID:
        raise InvalidRequest(f"'id' must be a string of at most {MAX_ID} characters")
    request = InferRequest("", tensors, "", request_id, outputs, parameters, size_bytes=size_bytes)
    return request, form


@dataclass(frozen=True, slots=True)
class _CachedHeader:
    inputs: list[tuple[str, str, tuple[int, ...], slice]]  # name, datatype, shape, and the span of the bytes
    size_bytes: int
    outputs: list[str]
    parameters: dict[str, Parameter]
    form: OutputForm


class HeaderCache:
    """A cache of parsed JSON headers, because clients often send the same JSON before different binary tensors."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._cached: dict[bytes, _CachedHeader] = {}

    def decode(
        self, header: memoryview, binary: memoryview, memory: SharedMemory | None
    ) -> tuple[InferRequest, OutputForm]:
        if len(header) > MAX_CACHED_BYTES:
            return decode_infer(header, binary, memory, self._limits)
        key = bytes(header)
        cached = self._cached.get(key)
        if cached is None or cached.size_bytes != len(binary):
            request, form = decode_infer(key, binary, memory, self._limits)
            self._cache_header(key, request, form, len(binary))
            return request, form
        tensors = [Tensor(name, datatype, shape, binary[span]) for name, datatype, shape, span in cached.inputs]
        outputs, parameters = cached.outputs[:], cached.parameters.copy()
        return InferRequest("", tensors, "", "", outputs, parameters, size_bytes=cached.size_bytes), cached.form

    def _cache_header(self, key: bytes, request: InferRequest, form: OutputForm, size_bytes: int) -> None:
        """Cache a header unless it has an id, which differs per request, or tensors that are not binary."""
        sizes = [len(tensor.data) for tensor in request.inputs]
        if request.request_id or form.targets or not all(sizes) or sum(sizes) != size_bytes:
            return
        if len(self._cached) == MAX_CACHED:
            self._cached.clear()
        ends = accumulate(sizes)
        inputs = [
            (tensor.name, tensor.datatype, tensor.shape, slice(end - size, end))
            for tensor, size, end in zip(request.inputs, sizes, ends, strict=True)
        ]
        self._cached[key] = _CachedHeader(inputs, size_bytes, request.outputs[:], request.parameters.copy(), form)


def check_counts(message: Mapping[str, Any], limits: Limits) -> None:
    """Raise RequestTooLarge if a request has too many inputs, outputs or parameters."""
    for key, limit in (
        ("inputs", limits.max_tensors),
        ("outputs", limits.max_tensors),
        ("parameters", limits.max_parameters),
    ):
        found = message.get(key)
        if found and type(found) in JSON_CONTAINERS and len(found) > limit:
            raise create_too_many_error(len(found), key, limit)


def create_too_many_error(count: int, items: str, limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request has {count} {items}, over the limit of {limit}: send fewer")


def decode_inputs(
    inputs: Any, binary: memoryview = NO_BYTES, memory: SharedMemory | None = None
) -> tuple[list[Tensor], int]:
    """Return the tensors and their size in bytes."""
    if type(inputs) is not list:
        raise InvalidRequest("'inputs' must be a list of tensors")
    tensors, offset, size_bytes = [], 0, 0
    for item in inputs:
        tensor, offset = _decode_input(item, binary, offset, memory, size_bytes)
        size_bytes += len(tensor.data)
        tensors.append(tensor)
    if offset != len(binary):
        raise InvalidRequest(
            f"{len(binary)} bytes follow the JSON, but the binary_data_size of the inputs add up to {offset}"
        )
    return tensors, size_bytes


def decode_raw(block: BlockDescription, body: bytes) -> tuple[InferRequest, OutputForm]:
    """Decode a body that is only the bytes of one tensor, by the specification of the model's only input."""
    if len(block.inputs) != 1:
        raise InvalidRequest(f"model '{block.model}' has {len(block.inputs)} inputs: name them in a JSON header")
    spec = block.inputs[0]
    shape = list(spec.shape)
    if spec.datatype == BYTES:
        shape, data = [1] * len(shape), pack_bytes([body])
    else:
        data = body
        if shape.count(-1) == 1:
            known = prod(size for size in shape if size >= 0) * ITEM_SIZES[spec.datatype]
            shape[shape.index(-1)] = len(body) // known if known else 0
        elif -1 in shape:
            raise InvalidRequest(
                f"input '{spec.name}' has several variable dimensions: send its shape in a JSON header"
            )
    tensor = Tensor(spec.name, spec.datatype, tuple(shape), data)
    check_tensor(tensor)
    return InferRequest("", [tensor], size_bytes=len(data)), OutputForm(is_binary=True)


def encode_infer(
    response: InferResponse, parameters: Mapping[str, Parameter], form: OutputForm, limits: Limits = LIMITS
) -> tuple[bytes, int | None]:
    """Return the body, and the length of its JSON, or None without binary tensors."""
    outputs: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    for tensor in response.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if form.targets and tensor.name in form.targets:
            output["parameters"] = form.targets[tensor.name].write(tensor)
        elif form.by_name.get(tensor.name, form.is_binary):
            output["parameters"] = {"binary_data_size": len(tensor.data)}
            binary.append(tensor.data)
        else:
            output = encode_output(tensor, limits.max_values)
        outputs.append(output)
    header: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.request_id:
        header["id"] = response.request_id
    if parameters or response.parameters:
        header["parameters"] = {**parameters, **response.parameters}
    header["outputs"] = outputs
    encoded = orjson.dumps(header, option=orjson.OPT_SERIALIZE_NUMPY)
    if not binary:
        return encoded, None
    return b"".join([encoded, *binary]), len(encoded)


def encode_output(tensor: Tensor, max_values: int) -> dict[str, Any]:
    data = to_json_data(tensor, max_values)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "data": data}


def count_large_json_bytes(response: InferResponse, form: OutputForm) -> int:
    """Return the bytes of the largest output that becomes JSON, or 0 if none is large."""
    largest = LARGE_BYTES
    for tensor in response.outputs:
        if len(tensor.data) > largest and not form.by_name.get(tensor.name, form.is_binary):
            largest = len(tensor.data)
    return largest if largest > LARGE_BYTES else 0


def decode_parameters(parameters: Any) -> dict[str, Parameter]:
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise InvalidRequest("'parameters' must be an object")
    size = 0
    for name, value in parameters.items():
        size += len(name) + (len(value) if type(value) is str else 0)
        if size > MAX_PARAMETER_CHARACTERS:
            raise RequestTooLarge(f"'parameters' take more than {MAX_PARAMETER_CHARACTERS} characters: send fewer")
        if type(value) not in (bool, int, float, str):
            raise InvalidRequest(f"parameter '{name[:80]}' must be a string, a number or a boolean")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise InvalidRequest(f"parameter '{name[:80]}' does not fit into 64 bits")
    return parameters


def _decode_input(
    item: Any, binary: memoryview, offset: int, memory: SharedMemory | None, taken_bytes: int
) -> tuple[Tensor, int]:
    """Return the tensor, and the offset of the next tensor's bytes."""
    if type(item) is not dict:
        raise InvalidTensor("each of 'inputs' must be an object")
    name, datatype = item.get("name"), item.get("datatype")
    if type(name) is not str or not 0 < len(name) <= MAX_NAME:
        raise InvalidTensor(f"'name' of each input must be a string of at most {MAX_NAME} characters")
    if type(datatype) is not str or datatype not in ELEMENT_TYPES:
        raise InvalidTensor(
            f"input '{name}' has unknown datatype {datatype!r:.40}; known are {', '.join(ELEMENT_TYPES)}"
        )
    shape = check_shape(name, item.get("shape"))
    size, place = _find_data(name, item)
    end = offset
    if place is not None:
        tensor = Tensor(name, datatype, shape, require_memory(memory).read(name, place, taken_bytes))
    elif size is None:
        tensor = Tensor(name, datatype, shape, pack_list(name, datatype, shape, item.get("data")))
    else:
        end = offset + size
        if end > len(binary):
            raise InvalidTensor(
                f"binary_data_size of input '{name}' is {size}, but {len(binary) - offset} bytes are left in the body"
            )
        tensor = Tensor(name, datatype, shape, binary[offset:end])
    check_tensor(tensor)
    return tensor, end


def _find_data(name: str, item: Mapping[str, Any]) -> tuple[int | None, RegionPlace | None]:
    """Return the size of the input's binary data, or its place in shared memory; both are None for data in JSON."""
    parameters = item.get("parameters")
    if parameters is None:
        return None, None
    if type(parameters) is not dict:
        raise InvalidTensor(f"'parameters' of input '{name}' must be an object")
    size = parameters.get("binary_data_size")
    place = read_place(f"input '{name}'", parameters) if REGION in parameters else None
    if size is not None and (type(size) is not int or size < 0):
        raise InvalidTensor(f"binary_data_size of input '{name}' must be a number of bytes")
    if ("data" in item) + (size is not None) + (place is not None) > 1:
        raise InvalidTensor(f"input '{name}' has more than one of 'data', binary_data_size and {REGION}: send one")
    return size, place


def _decode_outputs(outputs: Any, form: OutputForm, memory: SharedMemory | None) -> list[str]:
    if outputs is None:
        return []
    if type(outputs) is not list:
        raise InvalidRequest("'outputs' must be a list")
    names: dict[str, None] = {}
    targets: dict[str, RegionTarget] = {}
    for item in outputs:
        name = item.get("name") if type(item) is dict else None
        if type(name) is not str or not 0 < len(name) <= MAX_NAME or name in names:
            raise InvalidRequest("each of 'outputs' must be an object with a unique 'name'")
        parameters = decode_parameters(item.get("parameters"))
        if "classification" in parameters:
            raise InvalidRequest(f"parameter 'classification' of output '{name}' is not supported: leave it out")
        if "binary_data" in parameters:
            form.by_name[name] = _pop_flag(parameters, "binary_data")
        if REGION in parameters and (place := read_place(f"output '{name}'", parameters)) is not None:
            targets[name] = require_memory(memory).open_target(name, place)
        names[name] = None
    if targets:
        form.targets = targets
    return list(names)


def _pop_flag(parameters: dict[str, Parameter], name: str) -> bool:
    flag = parameters.pop(name, False)
    if type(flag) is not bool:
        raise InvalidRequest(f"parameter '{name}' must be a boolean")
    return flag
