"""gRPC messages are counted by their tags and lengths before they are parsed."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, PenstockError, RequestTooLarge
from penstock.gateway.grpc.oip_wire import ENVELOPE_BYTES, TypedMessage, check_contents, find_contents
from penstock.pb.inference import grpc_service_pb2 as pb

LIMITS = Limits(max_tensors=4, max_parameters=4, max_values=1024)
Fill = Callable[[pb.ModelInferRequest, int], None]


def parameters(message: pb.ModelInferRequest, count: int) -> None:
    for number in range(count):
        message.parameters[str(number)].int64_param = 1


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        (parameters, "4 parameters .limits.max_parameters"),
        (lambda message, count: message.inputs.extend([message.InferInputTensor()] * count), "4 inputs"),
        (lambda message, count: message.outputs.extend([message.InferRequestedOutputTensor()] * count), "4 outputs"),
        (lambda message, count: message.raw_input_contents.extend([b""] * count), "4 raw_input_contents"),
    ],
)
def test_what_may_be_few_is_counted(fill: Fill, says: str) -> None:
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
def test_what_is_refused(data: bytes, error: type[PenstockError]) -> None:
    with pytest.raises(error):
        find_contents(data, LIMITS)


def test_tensors_bytes_are_no_envelope() -> None:
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
    with pytest.raises(RequestTooLarge, match=r"limits.max_values.*raw_input_contents"):
        check_contents(TypedMessage(data + data[:3], [(0, len(data)), (0, len(data))]), LIMITS)


@given(st.binary())
def test_any_bytes_are_walked_or_refused(data: bytes) -> None:
    try:
        check_contents(TypedMessage(data, [*find_contents(data, LIMITS), (0, len(data))]), LIMITS)
    except PenstockError:
        pass
