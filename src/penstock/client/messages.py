"""The protocol's messages to and from NumPy arrays: what both clients share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from penstock.core.errors import InternalError, InvalidRequest, InvalidTensor
from penstock.core.requests import Parameter
from penstock.core.tensors import Array, Tensor, TensorSpec, check_tensor, from_array, to_array
from penstock.pb.inference import grpc_service_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 30.0
# Replies are bounded by what the caller asked for; a stream or call ends with its deadline.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Pings are rarer than any server minds; a peer that acknowledges nothing of what is sent is left by the time out.
    ("grpc.keepalive_time_ms", 3_600_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
OWN_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # with a connection of its own


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One version of a model, as the server's repository index lists it."""

    name: str
    version: str
    state: str  # READY, LOADING or UNAVAILABLE
    reason: str


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """What a model takes and gives; -1 is any size."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class CallControls(TypedDict, total=False):
    """What a call may ask of the server beside inference, as keyword arguments."""

    priority: int | None  # 1 is the highest
    session_id: str | int | None
    seq_no: int | None  # place in the session, from 1; without it requests go as they come
    start: bool | None  # of the session
    end: bool | None


# As the protocol names them in a request's parameters.
_CONTROLS: Mapping[str, str] = {
    "priority": "priority",
    "session_id": "session_id",
    "seq_no": "seq_no",
    "start": "sequence_start",
    "end": "sequence_end",
}
# Which field carries a value; a bool is an int, too.
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def encode_call(
    model: str,
    inputs: Mapping[str, Array],
    outputs: Sequence[str],
    version: str,
    parameters: Mapping[str, Parameter] | None,
    controls: CallControls,
) -> pb.ModelInferRequest:
    tensors = [_tensor(name, value) for name, value in inputs.items()]
    message = pb.ModelInferRequest(
        model_name=model,
        model_version=version,
        inputs=[
            pb.ModelInferRequest.InferInputTensor(name=t.name, datatype=t.datatype, shape=t.shape) for t in tensors
        ],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs],
        raw_input_contents=[bytes(tensor.data) for tensor in tensors],
    )
    for name, value in (parameters or {}).items():
        _put_parameter(message, name, value)
    given: Mapping[str, Any] = controls
    for name, value in given.items():
        if name not in _CONTROLS:
            raise TypeError(f"got an unexpected keyword argument '{name}'")
        if value is not None:
            _put_parameter(message, _CONTROLS[name], value)
    return message


def decode_outputs(message: pb.ModelInferResponse) -> dict[str, Array]:
    """Arrays over the message's own bytes, so read-only; BYTES become object arrays of bytes."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise InternalError("the server sent outputs without raw contents: it does not speak to this client")
    outputs: dict[str, Array] = {}
    for output, data in zip(message.outputs, message.raw_output_contents, strict=True):
        tensor = Tensor(output.name, output.datatype, tuple(output.shape), data)
        try:
            check_tensor(tensor)
            outputs[output.name] = to_array(tensor)
        except InvalidTensor as error:
            raise InternalError(f"the server sent an output that cannot be read: {error.message}") from error
    return outputs


def is_partial(message: pb.ModelInferResponse) -> bool:
    """Whether more answers to the same request may follow."""
    return "triton_final_response" in message.parameters and not message.parameters["triton_final_response"].bool_param


def pick_output(outputs: Mapping[str, Array], name: str, model: str) -> Array:
    if name not in outputs:
        raise InvalidRequest(f"model '{model}' gave {', '.join(outputs) or 'nothing'} and no '{name}': use infer()")
    return outputs[name]


def column(elements: Sequence[bytes | str]) -> Array:
    """BYTES [n, 1], as the tasks have them."""
    return objects(elements).reshape(-1, 1)


def decode_signature(message: pb.ModelMetadataResponse) -> ModelSignature:
    inputs, outputs = (
        tuple(TensorSpec(spec.name, spec.datatype, tuple(spec.shape)) for spec in specs)
        for specs in (message.inputs, message.outputs)
    )
    return ModelSignature(message.name, tuple(message.versions), message.platform, inputs, outputs)


def objects(values: Sequence[object]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _tensor(name: str, value: Array) -> Tensor:
    array = np.asarray(value)
    if array.dtype == object and not all(isinstance(element, bytes | str) for element in array.flat):
        raise InvalidTensor(f"input '{name}': an object array holds bytes or str, one for each BYTES element")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return from_array(name, array)


def _put_parameter(message: pb.ModelInferRequest, name: str, value: Parameter) -> None:
    for kind, field in _PARAMETERS.items():
        if isinstance(value, kind):
            setattr(message.parameters[name], field, value)
            return
    raise InvalidRequest(f"parameter '{name}' is a {type(value).__name__}: give bool, int, float or str")
