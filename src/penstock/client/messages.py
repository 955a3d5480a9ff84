"""Conversion between NumPy arrays and the messages of the Open Inference Protocol, for both clients."""

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
# Messages have no size limit here: their size depends on what the caller requests, and calls have deadlines.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Pings are so rare that no server refuses them; the timeout closes a connection whose peer acknowledges no data.
    ("grpc.keepalive_time_ms", 3_600_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
OWN_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # each with its own connection


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One version of a model, as the server's repository index lists it."""

    name: str
    version: str
    state: str  # READY, LOADING or UNAVAILABLE
    reason: str


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The inputs and outputs of a model; -1 in a shape means any size."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class CallControls(TypedDict, total=False):
    """Keyword arguments of a call that control how the server handles it."""

    priority: int | None  # 1 is the highest
    session_id: str | int | None
    seq_no: int | None  # position in the session, from 1; None: requests run in the order of their arrival
    start: bool | None  # this is the first request of the session
    end: bool | None  # this is the last request of the session


# Their names in the parameters of a request.
_CONTROLS: Mapping[str, str] = {
    "priority": "priority",
    "session_id": "session_id",
    "seq_no": "seq_no",
    "start": "sequence_start",
    "end": "sequence_end",
}
# The field for each type of value. bool comes first, because a bool is also an int.
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def encode_call(
    model: str,
    inputs: Mapping[str, Array],
    outputs: Sequence[str],
    version: str,
    parameters: Mapping[str, Parameter] | None,
    controls: CallControls,
) -> pb.ModelInferRequest:
    tensors = [_encode_tensor(name, value) for name, value in inputs.items()]
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
    """Return read-only arrays, which share the message's memory; BYTES become object arrays of bytes."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise InternalError("the server sent outputs without raw contents, which this client does not support")
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
    """Return whether more answers to this request may follow."""
    return "triton_final_response" in message.parameters and not message.parameters["triton_final_response"].bool_param


def pick_output(outputs: Mapping[str, Array], name: str, model: str) -> Array:
    if name not in outputs:
        found = ", ".join(outputs) or "nothing"
        raise InvalidRequest(f"model '{model}' returned {found}, but no '{name}': use infer()")
    return outputs[name]


def make_bytes_column(elements: Sequence[bytes | str]) -> Array:
    """Return a BYTES array of shape [n, 1], which the tasks take."""
    return make_object_array(elements).reshape(-1, 1)


def decode_signature(message: pb.ModelMetadataResponse) -> ModelSignature:
    inputs, outputs = (
        tuple(TensorSpec(spec.name, spec.datatype, tuple(spec.shape)) for spec in specs)
        for specs in (message.inputs, message.outputs)
    )
    return ModelSignature(message.name, tuple(message.versions), message.platform, inputs, outputs)


def make_object_array(values: Sequence[object]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _encode_tensor(name: str, value: Array) -> Tensor:
    array = np.asarray(value)
    if array.dtype == object and not all(isinstance(element, bytes | str) for element in array.flat):
        raise InvalidTensor(f"input '{name}': an object array must contain bytes or str, one for each BYTES element")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return from_array(name, array)


def _put_parameter(message: pb.ModelInferRequest, name: str, value: Parameter) -> None:
    for kind, field in _PARAMETERS.items():
        if isinstance(value, kind):
            setattr(message.parameters[name], field, value)
            return
    raise InvalidRequest(f"parameter '{name}' is a {type(value).__name__}: it must be bool, int, float or str")
