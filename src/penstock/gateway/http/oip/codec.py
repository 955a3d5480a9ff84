"""The Open Inference Protocol's REST bodies, JSON with binary tensors behind it, to and from the internal request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.requests import InferRequest, InferResponse, Parameter
from penstock.core.tensors import BYTES, ITEM_SIZES, NUMPY_TYPES, Buffer, Tensor, check_tensor, pack_bytes, unpack_bytes
from penstock.gateway.http.message import parse_object
from penstock.gateway.shared_memory.region import REGION, RegionPlace, RegionTarget, Targets, place_of
from penstock.gateway.shared_memory.regions import SharedMemory, served

MAX_RANK = 64  # what numpy can hold
MAX_DIMENSION = 2**63 - 1
MAX_NAME = 256
HALVES = ("FP16", "BF16")  # JSON has no notation that the protocol defines for them
KINDS: Mapping[str, frozenset[type]] = {
    **{name: frozenset({int}) for name in ITEM_SIZES if "INT" in name},
    **{name: frozenset({int, float}) for name in ("FP16", "BF16", "FP32", "FP64")},
    "BOOL": frozenset({bool}),
    BYTES: frozenset({str, bytes}),
}


@dataclass(slots=True)
class OutputForm:
    """Which outputs go behind the JSON as bytes, and which into shared memory."""

    is_binary: bool = False  # where `by_name` says nothing
    by_name: dict[str, bool] = field(default_factory=dict)
    targets: Targets | None = None


def decode_infer(
    header: Buffer, binary: memoryview, memory: SharedMemory | None = None
) -> tuple[InferRequest, OutputForm]:
    """The request, whose model, version and protocol the caller fills in, and how to answer it."""
    message = parse_object(header)
    inputs = message.get("inputs")
    if type(inputs) is not list:
        raise InvalidRequest("'inputs' must be a list of tensors")
    tensors, offset, size_bytes = [], 0, 0
    for item in inputs:
        tensor, offset = _decode_input(item, binary, offset, memory, size_bytes)
        size_bytes += len(tensor.data)
        tensors.append(tensor)
    if offset != len(binary):
        raise InvalidRequest(
            f"{len(binary)} bytes follow the JSON, but the inputs' binary_data_size claim {offset} of them"
        )
    parameters = decode_parameters(message.get("parameters"))
    form = OutputForm(_take_flag(parameters, "binary_data_output"))
    outputs = _decode_outputs(message.get("outputs"), form, memory)
    request_id = message.get("id", "")
    if type(request_id) is not str:
        raise InvalidRequest("'id' must be a string")
    request = InferRequest("", tensors, "", request_id, outputs, parameters, size_bytes=size_bytes)
    return request, form


def decode_raw(block: BlockDescription, body: bytes) -> tuple[InferRequest, OutputForm]:
    """A body that is one tensor's bytes and nothing else: the model says what they are."""
    if len(block.inputs) != 1:
        raise InvalidRequest(f"model '{block.model}' takes {len(block.inputs)} inputs: say which in a JSON header")
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
            raise InvalidRequest(f"input '{spec.name}' has several open dimensions: give its shape in a JSON header")
    tensor = Tensor(spec.name, spec.datatype, tuple(shape), data)
    check_tensor(tensor)
    return InferRequest("", [tensor], size_bytes=len(data)), OutputForm(is_binary=True)


def encode_infer(
    response: InferResponse, parameters: Mapping[str, Parameter], form: OutputForm
) -> tuple[bytes, int | None]:
    """The body, and where its JSON ends if binary tensors follow."""
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
            output["data"] = _json_data(tensor)
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


def decode_parameters(found: Any) -> dict[str, Parameter]:
    if found is None:
        return {}
    if type(found) is not dict:
        raise InvalidRequest("'parameters' must be an object")
    for name, value in found.items():
        if type(value) not in (bool, int, float, str):
            raise InvalidRequest(f"parameter '{name[:80]}' must be a string, a number or a boolean")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise InvalidRequest(f"parameter '{name[:80]}' does not fit into 64 bits")
    return found


def flatten(name: str, data: Any) -> tuple[list[Any], tuple[int, ...]]:
    """The elements of a list, nested or not, and the lengths of its levels."""
    if type(data) is not list:
        raise InvalidTensor(f"'data' of input '{name}' must be a list")
    flat: list[Any] = data
    lengths = [len(flat)]
    while list in (kinds := set(map(type, flat))):
        inner = set(map(len, flat)) if len(kinds) == 1 else set()
        if len(inner) != 1 or len(lengths) == MAX_RANK:
            raise InvalidTensor(f"'data' of input '{name}' is nested unevenly, or more than {MAX_RANK} deep")
        lengths.append(inner.pop())
        flat = list(chain.from_iterable(flat))
    return flat, tuple(lengths)


def pack_elements(name: str, datatype: str, flat: Sequence[Any]) -> bytes:
    allowed = KINDS.get(datatype)
    if allowed is None:
        raise InvalidTensor(f"input '{name}' has unknown datatype '{datatype[:80]}'")
    if not allowed.issuperset(map(type, flat)):
        wanted = " or ".join(sorted({"str": "string", "bytes": "string"}.get(k.__name__, k.__name__) for k in allowed))
        raise InvalidTensor(f"'data' of input '{name}' has elements that are not of {datatype}'s kind ({wanted})")
    if datatype == BYTES:
        return pack_bytes(flat)
    try:
        with np.errstate(over="raise"):
            wide = np.float32 if datatype in HALVES else NUMPY_TYPES[datatype]
            return np.array(flat, dtype=wide).astype(NUMPY_TYPES[datatype], copy=False).tobytes()
    except (OverflowError, FloatingPointError) as error:
        raise InvalidTensor(f"'data' of input '{name}' has values that {datatype} cannot hold") from error


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise InvalidTensor(f"'shape' of input '{name}' must be a list of at most {MAX_RANK} whole numbers")
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_DIMENSION:
            raise InvalidTensor(f"'shape' of input '{name}' has {size!r:.40}, which is not a size")
    return tuple(shape)


def json_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Numbers that JSON can hold: NaN becomes null there, but an infinity would be lost."""
    array = np.frombuffer(tensor.data, dtype=NUMPY_TYPES[tensor.datatype])
    if array.dtype.kind == "f" and np.isinf(array).any():
        raise InvalidRequest(
            f"output '{tensor.name}' has infinite values, which JSON cannot hold: ask for it with binary_data"
        )
    return array


def _json_data(tensor: Tensor) -> Any:
    if tensor.datatype in HALVES:
        raise InvalidRequest(f"output '{tensor.name}' is {tensor.datatype}: ask for it with binary_data")
    if tensor.datatype != BYTES:
        return json_array(tensor)
    try:
        return [element.decode() for element in unpack_bytes(tensor)]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"output '{tensor.name}' has bytes that are not UTF-8, which JSON cannot hold: ask for it with binary_data"
        ) from error


def _decode_input(
    item: Any, binary: memoryview, offset: int, memory: SharedMemory | None, taken_bytes: int
) -> tuple[Tensor, int]:
    """The tensor, and where the next one's bytes begin."""
    if type(item) is not dict:
        raise InvalidTensor("each of 'inputs' must be an object")
    name, datatype = item.get("name"), item.get("datatype")
    if type(name) is not str or not 0 < len(name) <= MAX_NAME:
        raise InvalidTensor(f"'name' of each input must be a string of at most {MAX_NAME} characters")
    if type(datatype) is not str or datatype not in KINDS:
        raise InvalidTensor(f"input '{name}' has unknown datatype {datatype!r:.40}; known are {', '.join(KINDS)}")
    shape = check_shape(name, item.get("shape"))
    size, place = _elsewhere(name, item)
    end = offset
    if place is not None:
        tensor = Tensor(name, datatype, shape, served(memory).read(name, place, taken_bytes))
    elif size is None:
        tensor = Tensor(name, datatype, shape, _from_json(name, datatype, shape, item.get("data")))
    else:
        end = offset + size
        if end > len(binary):
            raise InvalidTensor(f"input '{name}' claims {size} bytes, but {len(binary) - offset} are left in the body")
        tensor = Tensor(name, datatype, shape, binary[offset:end])
    check_tensor(tensor)
    return tensor, end


def _elsewhere(name: str, item: Mapping[str, Any]) -> tuple[int | None, RegionPlace | None]:
    """How many of the bytes behind the JSON are the input's, or where it is in shared memory; neither: in the JSON."""
    parameters = item.get("parameters")
    if parameters is None:
        return None, None
    if type(parameters) is not dict:
        raise InvalidTensor(f"'parameters' of input '{name}' must be an object")
    size = parameters.get("binary_data_size")
    place = place_of(f"input '{name}'", parameters) if REGION in parameters else None
    if size is not None and (type(size) is not int or size < 0):
        raise InvalidTensor(f"binary_data_size of input '{name}' must be a number of bytes")
    if ("data" in item) + (size is not None) + (place is not None) > 1:
        raise InvalidTensor(f"input '{name}' has more than one of 'data', binary_data_size and {REGION}")
    return size, place


def _from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> bytes:
    if datatype in HALVES:
        raise InvalidTensor(f"input '{name}' is {datatype}, which JSON does not carry: send it as binary data")
    flat, lengths = flatten(name, data)
    if len(flat) != prod(shape) or (len(lengths) > 1 and lengths != shape):
        raise InvalidTensor(f"'data' of input '{name}' is {list(lengths)} elements, but its shape is {list(shape)}")
    return pack_elements(name, datatype, flat)


def _decode_outputs(found: Any, form: OutputForm, memory: SharedMemory | None) -> list[str]:
    if found is None:
        return []
    if type(found) is not list:
        raise InvalidRequest("'outputs' must be a list")
    names: dict[str, None] = {}
    targets: dict[str, RegionTarget] = {}
    for item in found:
        name = item.get("name") if type(item) is dict else None
        if type(name) is not str or not 0 < len(name) <= MAX_NAME or name in names:
            raise InvalidRequest("each of 'outputs' must be an object with a 'name' of its own")
        parameters = decode_parameters(item.get("parameters"))
        if "classification" in parameters:
            raise InvalidRequest(f"output '{name}' asks for classification, which is not supported")
        if "binary_data" in parameters:
            form.by_name[name] = _take_flag(parameters, "binary_data")
        if REGION in parameters and (place := place_of(f"output '{name}'", parameters)) is not None:
            targets[name] = served(memory).target(name, place)
        names[name] = None
    if targets:
        form.targets = targets
    return list(names)


def _take_flag(parameters: dict[str, Parameter], name: str) -> bool:
    flag = parameters.pop(name, False)
    if type(flag) is not bool:
        raise InvalidRequest(f"parameter '{name}' must be a boolean")
    return flag
