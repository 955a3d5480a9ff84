"""The codec of gRPC: the Open Inference Protocol's messages to the request, and the response back."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.requests import InferRequest, InferResponse, Parameter
from penstock.core.tensors import BYTES, NUMPY_TYPES, Buffer, Tensor, pack_bytes, split_into_pieces
from penstock.gateway.oip.message_size import TypedMessage, check_contents
from penstock.gateway.shared_memory.region import NO_TARGETS, REGION, RegionPlace, RegionTarget, Targets, read_place
from penstock.gateway.shared_memory.regions import SharedMemory, require_memory
from penstock.pb.inference import grpc_service_pb2 as pb

# The field of InferTensorContents for each datatype. FP16 and BF16 are sent in raw_input_contents only.
_CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
LIMITS = Limits()  # the defaults
_RAW_OUTPUT_TAG = b"\x32"  # the tag of raw_output_contents
_PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def decode_request(
    message: pb.ModelInferRequest, protocol: str, memory: SharedMemory | None = None, limits: Limits = LIMITS
) -> InferRequest:
    inputs, raw = message.inputs, message.raw_input_contents
    outputs, parameters = message.outputs, message.parameters
    count = len(inputs)
    if outputs or parameters or count > limits.max_tensors:
        _check_counts(count, len(outputs), len(parameters), limits)
    if raw and len(raw) == count:
        # Slices are lists. Iterating them is twice as fast as iterating protobuf containers, which end by IndexError.
        tensors = [
            Tensor(i.name, i.datatype, tuple(i.shape[:]), data) for i, data in zip(inputs[:], raw[:], strict=True)
        ]
        size = sum([len(tensor.data) for tensor in tensors])  # reading `raw` again would copy it
    else:
        tensors, size = _gather_inputs(message, memory)
    return InferRequest(
        message.model_name,
        tensors,
        message.model_version,
        message.id,
        _read_output_names(outputs) if outputs else [],
        decode_parameters(parameters) if parameters else {},
        protocol=protocol,
        size_bytes=size,
    )


def _read_output_names(outputs: Iterable[pb.ModelInferRequest.InferRequestedOutputTensor]) -> list[str]:
    names = [output.name for output in outputs]
    if len(set(names)) != len(names):
        raise InvalidRequest("an output is requested twice: name each of 'outputs' once")
    return names


def decode_typed(
    typed: TypedMessage, protocol: str, memory: SharedMemory | None, limits: Limits
) -> tuple[pb.ModelInferRequest, InferRequest, Targets]:
    """Return the fields of a message that the answer needs, the request, and the targets of its outputs."""
    check_contents(typed, limits)
    try:
        message = pb.ModelInferRequest.FromString(typed.take())
    except DecodeError as error:
        raise InvalidRequest("the message is not an inference.ModelInferRequest") from error
    rest = pb.ModelInferRequest(model_name=message.model_name, id=message.id)
    rest.parameters.MergeFrom(message.parameters)
    return rest, decode_request(message, protocol, memory, limits), find_targets(message, memory)


def _check_counts(inputs: int, outputs: int, parameters: int, limits: Limits) -> None:
    if max(inputs, outputs) > limits.max_tensors or parameters > limits.max_parameters:
        raise RequestTooLarge(
            f"the request has {inputs} inputs, {outputs} outputs and {parameters} parameters; at most "
            f"{limits.max_tensors} inputs, {limits.max_tensors} outputs and {limits.max_parameters} parameters are "
            "allowed: send fewer"
        )


def find_targets(message: pb.ModelInferRequest, memory: SharedMemory | None) -> Targets:
    """Return the targets of the outputs that the request wants in shared memory."""
    found: dict[str, RegionTarget] = {}
    for output in message.outputs:
        place = _find_region_place(f"output '{output.name}'", output.parameters) if output.parameters else None
        if place is not None:
            found[output.name] = require_memory(memory).open_target(output.name, place)
    return found or NO_TARGETS


def encode_response(
    response: InferResponse, message: pb.ModelInferRequest, targets: Targets = NO_TARGETS
) -> pb.ModelInferResponse:
    encoded, contents = _encode_head(response, message, targets)
    for content in contents:
        encoded.raw_output_contents.append(bytes(content))
    return encoded


class SerializedResponse:
    """A serialized answer, which gRPC sends in place of a protobuf message."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the method of protobuf's messages
        """Return the data and drop it here, so that gRPC does not keep it twice."""
        data, self._data = self._data, b""
        return data


def serialize_response(
    response: InferResponse, message: pb.ModelInferRequest, targets: Targets = NO_TARGETS
) -> SerializedResponse:
    """Serialize a large answer without copying its tensors into a message first."""
    encoded, contents = _encode_head(response, message, targets)
    parts: list[Buffer] = [encoded.SerializeToString()]
    for content in contents:
        parts += (_RAW_OUTPUT_TAG + _encode_varint(len(content)), content)
    return SerializedResponse(b"".join(parts))


def _encode_head(
    response: InferResponse, message: pb.ModelInferRequest, targets: Targets
) -> tuple[pb.ModelInferResponse, list[Buffer]]:
    """Return the answer without its tensors' bytes, and these bytes."""
    encoded = pb.ModelInferResponse()  # filled in place: a constructor with keywords takes twice as long
    contents: list[Buffer] = []
    encoded.model_name = response.model
    encoded.model_version = response.version
    if response.request_id:
        encoded.id = response.request_id
    for tensor in response.outputs:
        output = encoded.outputs.add()
        output.name, output.datatype = tensor.name, tensor.datatype
        output.shape.extend(tensor.shape)
        if targets and tensor.name in targets:
            _put_parameters(output, targets[tensor.name].write(tensor))
            contents.append(b"")  # clients find the other outputs by their index
        else:
            contents.append(tensor.data)
    if message.parameters:
        for name, parameter in message.parameters.items():
            encoded.parameters[name].CopyFrom(parameter)
    if response.parameters:
        _put_parameters(encoded, response.parameters)
    return encoded, contents


def _encode_varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _put_parameters(
    encoded: "pb.ModelInferResponse | pb.ModelInferResponse.InferOutputTensor", parameters: Mapping[str, Parameter]
) -> None:
    for name, value in parameters.items():
        setattr(encoded.parameters[name], _PARAMETER_FIELDS[type(value)], value)


def decode_parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            value = found[name] = getattr(parameter, kind)
            if kind == "uint64_param" and value >= 2**63:
                raise InvalidRequest(f"parameter '{name[:80]}' is over the largest supported value, 2^63 - 1")
    return found


def _gather_inputs(message: pb.ModelInferRequest, memory: SharedMemory | None) -> tuple[list[Tensor], int]:
    """Return the inputs and their size, for a message with inputs in shared memory or in `contents`."""
    raw = message.raw_input_contents
    places = [_find_region_place(f"input '{i.name}'", i.parameters) if i.parameters else None for i in message.inputs]
    if raw and len(raw) != places.count(None):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} entries for {places.count(None)} inputs that are not in shared memory: "
            f"send all of these raw, or none"
        )
    following = iter(raw)
    tensors: list[Tensor] = []
    size = 0
    for given, place in zip(message.inputs, places, strict=True):
        if place is not None:
            data = require_memory(memory).read(given.name, place, size)
            tensor = Tensor(given.name, given.datatype, tuple(given.shape), data)
        elif raw:
            tensor = Tensor(given.name, given.datatype, tuple(given.shape), next(following))
        else:
            tensor = _decode_contents(given)
        size += len(tensor.data)
        tensors.append(tensor)
    return tensors, size


def _find_region_place(tensor_label: str, parameters: Mapping[str, Any]) -> RegionPlace | None:
    return read_place(tensor_label, decode_parameters(parameters)) if REGION in parameters else None


def _decode_contents(tensor: Any) -> Tensor:
    field = _CONTENTS_FIELDS.get(tensor.datatype)
    if field is None:
        problem = "is unknown" if tensor.datatype not in NUMPY_TYPES else "must be sent in raw_input_contents"
        raise InvalidTensor(f"input '{tensor.name}': datatype '{tensor.datatype}' {problem}")
    values = getattr(tensor.contents, field)
    if tensor.datatype == BYTES:
        data = pack_bytes(values)
    else:
        dtype = NUMPY_TYPES[tensor.datatype]
        try:
            data = b"".join([np.array(piece, dtype=dtype).tobytes() for piece in split_into_pieces(values)])
        except (OverflowError, ValueError) as error:
            raise InvalidTensor(f"input '{tensor.name}' has values that {tensor.datatype} cannot hold") from error
    return Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), data)
