"""Counting the fields and elements of gRPC messages before they are parsed."""

from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, PenstockError, RequestTooLarge
from penstock.gateway.oip.message_size import ENVELOPE_BYTES, TypedMessage, check_contents, find_contents
from penstock.pb.inference import grpc_service_pb2 as pb


class FewLimits(Limits):
    max_tensors: ClassVar[int] = 4
    max_parameters: ClassVar[int] = 4
    max_values: ClassVar[int] = 1024


LIMITS = FewLimits()
Fill = Callable[[pb.ModelInferRequest, int], None]


def parameters(message: pb.ModelInferRequest, count: int) -> None:
    for number in range(count):
        message.parameters[str(number)].int64_param = 1


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        (parameters, "4 parameters: send fewer"),
        (lambda message, count: message.inputs.extend([message.InferInputTensor()] * count), "4 inputs"),
        (lambda message, count: message.outputs.extend([message.InferRequestedOutputTensor()] * count), "4 outputs"),
        (lambda message, count: message.raw_input_contents.extend([b""] * count), "4 raw_input_contents"),
    ],
)
def test_repeated_fields_are_counted(fill: Fill, says: str) -> None:
    message = pb.ModelInferRequest()
    fill(message, 4)
    assert find_contents(message.SerializeToString(), LIMITS) == []
    fill(message, 5)
    with pytest.raises(RequestTooLarge, match=says):
        find_contents(message.SerializeToString(), LIMITS)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x0a\x00" * 200, RequestTooLarge),  # a name, again and again
        (b"\x78\x01" * 200, RequestTooLarge),  # unknown fields
        (b"\x7b\x7c", InvalidRequest),  # a group
        (b"\x0a", InvalidRequest),
        (b"\x0a\x05abc", InvalidRequest),
        (b"\xff" * 20, InvalidRequest),
        (b"\x2a\x03\x0a\x05a", InvalidRequest),  # beyond its input
        (pb.ModelInferRequest(id="a" * (ENVELOPE_BYTES + 1)).SerializeToString(), RequestTooLarge),
    ],
)
def test_invalid_messages_are_refused(data: bytes, error: type[PenstockError]) -> None:
    with pytest.raises(error):
        find_contents(data, LIMITS)


def test_bytes_of_tensors_do_not_count_as_envelope() -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x")
    tensor.contents.fp32_contents.extend([1.0] * 300_000)
    raw = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[bytes(2 * ENVELOPE_BYTES)]).SerializeToString()
    ((start, end),) = find_contents(raw, LIMITS)
    assert pb.InferTensorContents.FromString(raw[start:end]) == tensor.contents


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bool_contents", True),
        ("int_contents", -1),
        ("int64_contents", 2**40),
        ("uint_contents", 1),
        ("uint64_contents", 2**63),
        ("fp32_contents", 1.5),
        ("fp64_contents", 1.5),
        ("bytes_contents", b""),
        ("bytes_contents", b"a" * 200),
    ],
)
def test_typed_elements_are_counted(field: str, value: object) -> None:
    contents = pb.InferTensorContents()
    getattr(contents, field).extend([value] * 1024)
    data = contents.SerializeToString()
    check_contents(TypedMessage(data, [(0, len(data))]), LIMITS)
    with pytest.raises(RequestTooLarge, match="1024 elements: send tensors in raw_input_contents"):
        check_contents(TypedMessage(data + data[:3], [(0, len(data)), (0, len(data))]), LIMITS)


@given(st.binary())
def test_arbitrary_bytes_are_counted_or_refused(data: bytes) -> None:
    try:
        check_contents(TypedMessage(data, [*find_contents(data, LIMITS), (0, len(data))]), LIMITS)
    except PenstockError:
        pass
