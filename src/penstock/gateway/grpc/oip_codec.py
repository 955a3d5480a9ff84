"""The codec of gRPC: the Open Inference Protocol's messages to and from the request and its answer."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.requests import InferRequest, InferResponse, Parameter
from penstock.core.tensors import BYTES, NUMPY_TYPES, Tensor, pack_bytes, pieces
from penstock.gateway.grpc.oip_wire import TypedMessage, check_contents
from penstock.gateway.shared_memory.region import NO_TARGETS, REGION, RegionPlace, RegionTarget, Targets, place_of
from penstock.gateway.shared_memory.regions import SharedMemory, served
from penstock.pb.inference import grpc_service_pb2 as pb

# Which field of InferTensorContents carries a datatype. FP16 and BF16 travel raw only.
_CONTENTS = {
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
LIMITS = Limits()  # where nobody says otherwise
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def decode_request(
    message: pb.ModelInferRequest, protocol: str, memory: SharedMemory | None = None, limits: Limits = LIMITS
) -> InferRequest:
    inputs, raw = message.inputs, message.raw_input_contents
    outputs, parameters = message.outputs, message.parameters
    count = len(inputs)
    if outputs or parameters or count > limits.max_tensors:
        _check_counts(count, len(outputs), len(parameters), limits)
    if raw and len(raw) == count:
        # Slices are lists, whose ends no exception tells: that is half the time.
        tensors = [
            Tensor(i.name, i.datatype, tuple(i.shape[:]), data) for i, data in zip(inputs[:], raw[:], strict=True)
        ]
        size = sum([len(tensor.data) for tensor in tensors])  # each look at `raw` makes a copy
    else:
        tensors, size = _gather(message, memory)
    return InferRequest(
        message.model_name,
        tensors,
        message.model_version,
        message.id,
        _names(outputs) if outputs else [],
        decode_parameters(parameters) if parameters else {},
        protocol=protocol,
        size_bytes=size,
    )


def _names(outputs: Iterable[pb.ModelInferRequest.InferRequestedOutputTensor]) -> list[str]:
    names = [output.name for output in outputs]
    if len(set(names)) != len(names):
        raise InvalidRequest("an output is asked for twice: name each of 'outputs' once")
    return names


def decode_typed(
    typed: TypedMessage, protocol: str, memory: SharedMemory | None, limits: Limits
) -> tuple[pb.ModelInferRequest, InferRequest, Targets]:
    """What is needed of a message for its answer, its request, and where the outputs go that are not sent."""
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
            f"the request has {inputs} inputs, {outputs} outputs and {parameters} parameters, over limits.max_tensors "
            f"({limits.max_tensors}) or limits.max_parameters ({limits.max_parameters}): send fewer"
        )


def find_targets(message: pb.ModelInferRequest, memory: SharedMemory | None) -> Targets:
    """Where those outputs go that the request wants in shared memory."""
    found: dict[str, RegionTarget] = {}
    for output in message.outputs:
        place = _place(f"output '{output.name}'", output.parameters) if output.parameters else None
        if place is not None:
            found[output.name] = served(memory).target(output.name, place)
    return found or NO_TARGETS


def encode_response(
    response: InferResponse, message: pb.ModelInferRequest, targets: Targets = NO_TARGETS
) -> pb.ModelInferResponse:
    encoded = pb.ModelInferResponse()  # filled in place: a constructor with keywords takes twice as long
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
            encoded.raw_output_contents.append(b"")  # clients find the others by their place in the list
        else:
            encoded.raw_output_contents.append(bytes(tensor.data))
    if message.parameters:
        for name, parameter in message.parameters.items():
            encoded.parameters[name].CopyFrom(parameter)
    if response.parameters:
        _put_parameters(encoded, response.parameters)
    return encoded


def _put_parameters(
    encoded: "pb.ModelInferResponse | pb.ModelInferResponse.InferOutputTensor", parameters: Mapping[str, Parameter]
) -> None:
    for name, value in parameters.items():
        setattr(encoded.parameters[name], _PARAMETERS[type(value)], value)


def decode_parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            value = found[name] = getattr(parameter, kind)
            if kind == "uint64_param" and value >= 2**63:
                raise InvalidRequest(f"parameter '{name[:80]}' is over 2^63 - 1, which is the largest that is served")
    return found


def _gather(message: pb.ModelInferRequest, memory: SharedMemory | None) -> tuple[list[Tensor], int]:
    """The inputs and their size, where not all are raw: some are in shared memory, or all others in `contents`."""
    raw = message.raw_input_contents
    places = [_place(f"input '{i.name}'", i.parameters) if i.parameters else None for i in message.inputs]
    if raw and len(raw) != places.count(None):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} entries for {places.count(None)} inputs that are not in shared memory: "
            f"give all of these raw, or none"
        )
    following = iter(raw)
    tensors: list[Tensor] = []
    size = 0
    for given, place in zip(message.inputs, places, strict=True):
        if place is not None:
            data = served(memory).read(given.name, place, size)
            tensor = Tensor(given.name, given.datatype, tuple(given.shape), data)
        elif raw:
            tensor = Tensor(given.name, given.datatype, tuple(given.shape), next(following))
        else:
            tensor = _from_contents(given)
        size += len(tensor.data)
        tensors.append(tensor)
    return tensors, size


def _place(what: str, parameters: Mapping[str, Any]) -> RegionPlace | None:
    return place_of(what, decode_parameters(parameters)) if REGION in parameters else None


def _from_contents(tensor: Any) -> Tensor:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        known = "unknown" if tensor.datatype not in NUMPY_TYPES else "to be sent in raw_input_contents"
        raise InvalidTensor(f"input '{tensor.name}': datatype '{tensor.datatype}' is {known}")
    values = getattr(tensor.contents, field)
    if tensor.datatype == BYTES:
        data = pack_bytes(values)
    else:
        dtype = NUMPY_TYPES[tensor.datatype]
        try:
            data = b"".join([np.array(piece, dtype=dtype).tobytes() for piece in pieces(values)])
        except (OverflowError, ValueError) as error:
            raise InvalidTensor(f"input '{tensor.name}' has values that {tensor.datatype} cannot hold") from error
    return Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), data)
