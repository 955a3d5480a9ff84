"""The gRPC codec: messages to requests, responses to messages, and errors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.requests import InferResponse, Parameter, Timing
from penstock.core.tensors import NUMPY_TYPES, Tensor, pack_bytes
from penstock.gateway.oip.grpc_codec import (
    decode_parameters,
    decode_request,
    encode_response,
    find_targets,
    serialize_response,
)
from penstock.gateway.shared_memory.region import NO_TARGETS
from penstock.pb.inference import grpc_service_pb2 as pb


def typed(datatype: str, field: str, values: Sequence[Any], shape: Sequence[int] | None = None) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[len(values)] if shape is None else shape)
    getattr(tensor.contents, field).extend(values)
    return message


def raw(*tensors: Tensor) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(bytes(tensor.data))
    return message


def answer(*outputs: Tensor, request_id: str = "", **parameters: Parameter) -> InferResponse:
    return InferResponse("m", "3", request_id, list(outputs), Timing(), parameters)


# --- requests


def test_every_field_of_a_message_reaches_the_request() -> None:
    message = raw(Tensor("a", "FP32", (1, 2), bytes(8)), Tensor("b", "INT8", (3,), b"abc"))
    message.model_version = "2"
    message.id = "r1"
    message.outputs.add(name="z")
    message.outputs.add(name="y")
    message.parameters["mode"].string_param = "fast"
    request = decode_request(message, "stream")
    assert request.inputs == [Tensor("a", "FP32", (1, 2), bytes(8)), Tensor("b", "INT8", (3,), b"abc")]
    assert (request.model, request.version, request.request_id, request.protocol) == ("m", "2", "r1", "stream")
    assert (request.outputs, request.parameters, request.size_bytes) == (["z", "y"], {"mode": "fast"}, 11)
    assert (request.timeout_s, request.traceparent) == (None, "")


def test_a_minimal_message_is_decoded() -> None:
    request = decode_request(pb.ModelInferRequest(), "grpc")
    assert (request.model, request.version, request.request_id) == ("", "", "")
    assert (request.inputs, request.outputs, request.parameters, request.size_bytes) == ([], [], {}, 0)


@pytest.mark.parametrize("datatype", [*NUMPY_TYPES, "BYTES", "FP128", ""])
@pytest.mark.parametrize("shape", [(), (2,), (-1, 4), (2**62, 2**62), (0,) * 70])
def test_raw_bytes_are_not_copied(datatype: str, shape: tuple[int, ...]) -> None:
    """Datatype, shape and size are compared later, when the request is admitted."""
    tensor = Tensor("x", datatype, shape, b"\0\1\xff")
    assert decode_request(raw(tensor), "grpc").inputs == [tensor]


def test_names_of_inputs_are_not_checked_by_the_codec() -> None:
    tensors = [Tensor("x", "INT8", (1,), b"1"), Tensor("x", "INT8", (1,), b"2"), Tensor("", "INT8", (1,), b"3")]
    assert decode_request(raw(*tensors), "grpc").inputs == tensors


def test_an_output_requested_twice_is_refused() -> None:
    message = raw()
    message.outputs.add(name="y")
    message.outputs.add()
    assert decode_request(message, "grpc").outputs == ["y", ""]
    message.outputs.add(name="y")
    with pytest.raises(InvalidRequest, match="requested twice"):
        decode_request(message, "grpc")


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", 128),
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 2**15),
        ("UINT8", "uint_contents", 300),
        ("UINT16", "uint_contents", 2**16),
    ],
)
def test_typed_contents_outside_their_datatype_are_refused(datatype: str, field: str, value: int) -> None:
    with pytest.raises(InvalidTensor, match=f"'x' has values that {datatype} cannot hold"):
        decode_request(typed(datatype, field, [0, value]), "grpc")


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -np.inf]),
        ("FP64", "fp64_contents", [1e-300, 1.7e308]),
    ],
)
def test_typed_contents_of_every_datatype(datatype: str, field: str, values: list[Any]) -> None:
    expected = np.array(values, NUMPY_TYPES[datatype]).tobytes()
    request = decode_request(typed(datatype, field, values, [1, 2]), "grpc")
    assert request.inputs == [Tensor("x", datatype, (1, 2), expected)]
    assert request.size_bytes == len(expected)
    assert decode_request(typed(datatype, field, []), "grpc").inputs == [Tensor("x", datatype, (0,), b"")]


def test_typed_bytes_are_decoded() -> None:
    values = [b"", "zażółć".encode(), b"\xff\0"]
    request = decode_request(typed("BYTES", "bytes_contents", values), "grpc")
    assert request.inputs == [Tensor("x", "BYTES", (3,), pack_bytes(values))]
    assert request.size_bytes == 3 * 4 + 12
    assert decode_request(typed("BYTES", "bytes_contents", [], [1]), "grpc").inputs[0].data == b""


@pytest.mark.parametrize("shape", [[], [5], [-1], [2**62, 2**62]])
def test_typed_contents_keep_their_shape_whatever_it_is(shape: list[int]) -> None:
    request = decode_request(typed("INT8", "int_contents", [1, 2], shape), "grpc")
    assert request.inputs == [Tensor("x", "INT8", tuple(shape), b"\1\2")]


def test_only_the_datatype_s_own_field_is_read() -> None:
    message = typed("FP32", "fp64_contents", [1.0])
    assert decode_request(message, "grpc").inputs[0].data == b""
    message.inputs[0].contents.fp32_contents.append(2.0)
    assert decode_request(message, "grpc").inputs[0].data == np.float32(2).tobytes()


@pytest.mark.parametrize(
    ("datatype", "says"),
    [
        ("FP16", "input 'x': datatype 'FP16' must be sent in raw_input_contents"),
        ("BF16", "input 'x': datatype 'BF16' must be sent in raw_input_contents"),
        ("FP128", "input 'x': datatype 'FP128' is unknown"),
        ("", "input 'x': datatype '' is unknown"),
    ],
)
def test_datatypes_without_contents(datatype: str, says: str) -> None:
    with pytest.raises(InvalidTensor) as refused:
        decode_request(typed(datatype, "fp32_contents", [1.0]), "grpc")
    assert (refused.value.code, refused.value.message) == ("invalid_tensor", says)


def test_raw_contents_take_precedence_over_typed_ones() -> None:
    message = typed("INT8", "int_contents", [1, 2])
    message.raw_input_contents.append(b"\3\4")
    assert decode_request(message, "grpc").inputs[0].data == b"\3\4"


@pytest.mark.parametrize(("inputs", "entries"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_raw_contents_for_only_some_inputs_are_refused(inputs: int, entries: int) -> None:
    message = raw(*(Tensor("x", "INT8", (1,), b"1") for _ in range(inputs)))
    del message.raw_input_contents[:]
    message.raw_input_contents.extend([b"1"] * entries)
    with pytest.raises(InvalidRequest) as refused:
        decode_request(message, "grpc")
    assert refused.value.code == "invalid_request"
    assert refused.value.message == (
        f"raw_input_contents has {entries} entries for {inputs} inputs that are not in shared memory: "
        "send all of these raw, or none"
    )


def test_parameters_of_each_kind() -> None:
    message = pb.ModelInferRequest()
    message.parameters["b"].bool_param = False
    message.parameters["i"].int64_param = -(2**63)
    message.parameters["u"].uint64_param = 2**63 - 1
    message.parameters["d"].double_param = 0.5
    message.parameters["s"].string_param = "zażółć"
    message.parameters["unset"].SetInParent()
    found = decode_parameters(message.parameters)
    assert found == {"b": False, "i": -(2**63), "u": 2**63 - 1, "d": 0.5, "s": "zażółć"}
    assert {name: type(value) for name, value in found.items()} == {"b": bool, "i": int, "u": int, "d": float, "s": str}
    assert decode_request(message, "grpc").parameters == found


@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_a_parameter_over_the_largest_integer_is_refused(value: int) -> None:
    message = raw(Tensor("x", "INT8", (1,), b"1"))
    message.parameters["u"].uint64_param = value
    with pytest.raises(InvalidRequest, match="parameter 'u' is over the largest"):
        decode_request(message, "grpc")


def test_tensor_parameters_matter_only_for_shared_memory() -> None:
    message = raw(Tensor("x", "INT8", (1,), b"1"))
    message.inputs[0].parameters["binary_data_size"].int64_param = 7
    message.outputs.add(name="y").parameters["classification"].int64_param = 3
    request = decode_request(message, "grpc")
    assert (request.inputs[0].data, request.outputs, request.parameters) == (b"1", ["y"], {})
    assert find_targets(message, None) is NO_TARGETS


def test_outputs_in_shared_memory_are_refused_without_it() -> None:
    message = pb.ModelInferRequest()
    message.outputs.add(name="plain")
    parameters = message.outputs.add(name="y").parameters
    parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InvalidTensor, match=r"^shared_memory_byte_size of output 'y' must be a whole number from 0$"):
        find_targets(message, None)
    parameters["shared_memory_byte_size"].int64_param = 8
    with pytest.raises(InvalidRequest, match=r"^this endpoint does not support shared memory: send the data$"):
        find_targets(message, None)


# --- answers


def test_outputs_are_raw_and_in_their_order() -> None:
    outputs = [
        Tensor("y", "FP32", (1, 2), memoryview(bytes(range(8)))),
        Tensor("t", "BYTES", (1,), pack_bytes(["a"])),
        Tensor("e", "INT64", (0, 3), b""),
        Tensor("s", "BF16", (), b"\1\2"),
    ]
    encoded = encode_response(answer(*outputs, request_id="r1"), pb.ModelInferRequest())
    assert (encoded.model_name, encoded.model_version, encoded.id) == ("m", "3", "r1")
    assert [(o.name, o.datatype, tuple(o.shape)) for o in encoded.outputs] == [
        ("y", "FP32", (1, 2)),
        ("t", "BYTES", (1,)),
        ("e", "INT64", (0, 3)),
        ("s", "BF16", ()),
    ]
    assert list(encoded.raw_output_contents) == [bytes(range(8)), b"\1\0\0\0a", b"", b"\1\2"]
    assert not any(output.HasField("contents") or output.parameters for output in encoded.outputs)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 2_000_000])
def test_a_serialized_answer_is_that_of_the_message(size: int) -> None:
    outputs = [Tensor("y", "UINT8", (size,), memoryview(bytes(size))), Tensor("z", "UINT8", (3,), b"abc")]
    sent, message = answer(*outputs, request_id="r1", mode=7), pb.ModelInferRequest(model_name="m")
    serialized = serialize_response(sent, message)
    assert pb.ModelInferResponse.FromString(serialized.SerializeToString()) == encode_response(sent, message)
    assert serialized.SerializeToString() == b""


def test_an_answer_without_outputs_or_id() -> None:
    encoded = encode_response(answer(), pb.ModelInferRequest(id="the request's own is in the response"))
    assert (encoded.id, len(encoded.outputs), len(encoded.raw_output_contents), dict(encoded.parameters)) == (
        "",
        0,
        0,
        {},
    )


def test_parameters_of_the_request_are_returned_below_those_of_the_answer() -> None:
    message = pb.ModelInferRequest()
    message.parameters["u"].uint64_param = 2**63 - 1
    message.parameters["mode"].string_param = "fast"
    encoded = encode_response(answer(mode=7), message)
    assert decode_parameters(encoded.parameters) == {"u": 2**63 - 1, "mode": 7}
    assert encoded.parameters["u"].WhichOneof("parameter_choice") == "uint64_param"


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, "bool_param"), (0, "int64_param"), (-(2**63), "int64_param"), (0.0, "double_param"), ("", "string_param")],
)
def test_an_answer_s_parameters_of_each_kind(value: Parameter, kind: str) -> None:
    parameter = encode_response(answer(p=value), pb.ModelInferRequest()).parameters["p"]
    assert parameter.WhichOneof("parameter_choice") == kind
    assert getattr(parameter, kind) == value
