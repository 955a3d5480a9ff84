"""Valid inference requests of the Open Inference Protocol, and changes that make them invalid."""

import io
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from PIL import Image

from penstock.core.tensors import NUMPY_TYPES, pack_bytes
from penstock.pb.inference import grpc_service_pb2 as pb
from tests.chaos.calls import make_infer_request, make_text_request
from tests.chaos.mutation import mutate
from tests.chaos.repository import ANY_SIZE_MODEL, ECHO, ECHO_FLOATS

Request = pb.ModelInferRequest
Fault = Callable[[DrawFn, Request], None]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NAMES = (
    st.sampled_from([ECHO, ANY_SIZE_MODEL, "minilm", "srcnn", "", "..", "../echo", "echo/1", "ECHO", "x" * 300]) | TEXT
)
TENSOR_NAMES = st.sampled_from(["x", "n", "s", "text", "image", "y", "embedding", ""]) | TEXT
DATATYPES = st.sampled_from([*NUMPY_TYPES, "BYTES", "FP8", "fp32", "STRING", ""]) | TEXT
SIZES = st.sampled_from(
    [0, 1, -1, 2, 255, 257, 4097, 2**31, 2**31 - 1, 2**32, 2**62, 2**63 - 1, -(2**63)]
) | st.integers(-(2**63), 2**63 - 1)
SHAPES = st.lists(SIZES, max_size=5) | st.just([1] * 70)
FRAMINGS = st.sampled_from(
    [b"", b"\x00", b"\xff\xff\xff\xff", b"\x05\x00\x00\x00abc", b"\x01\x00\x00\x00\xff", b"\0" * 64]
)
# Values that belong together, so that the tensors are checked.
TENSORS = FieldMask(paths=["model_name", "inputs", "raw_input_contents"])


def list_valid_requests() -> list[Request]:
    """Return one request for each model of the repository."""
    floats = np.arange(ECHO_FLOATS, dtype=np.float32).tobytes()
    texts = ("s", "BYTES", (2, 1), pack_bytes(["left", "right"]))
    return [
        make_infer_request(ECHO, ("x", "FP32", (1, ECHO_FLOATS), floats)),
        make_infer_request(ANY_SIZE_MODEL, ("n", "INT64", (2, 3), np.arange(6).tobytes()), texts),
        make_text_request("minilm", "a penstock", "meters water"),
        make_infer_request("srcnn", ("image", "BYTES", (1, 1), pack_bytes([make_small_image()]))),
    ]


def make_small_image() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)).save(out, "PNG")
    return out.getvalue()


@st.composite
def draw_wrong_requests(draw: DrawFn) -> Request:
    request = Request()
    request.CopyFrom(draw(st.sampled_from(list_valid_requests())))
    for fault in draw(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=3)):
        fault(draw, request)
    return request


def mutate_request(seeds: Sequence[Request], rng: Random) -> Request:
    """Return a parsable request with fields of several requests, and with some tensor bytes changed."""
    bent = Request()
    for field in Request.DESCRIPTOR.fields:
        FieldMask(paths=[field.name]).MergeMessage(rng.choice(seeds), bent)
    if rng.random() < 0.8:
        TENSORS.MergeMessage(rng.choice(seeds), bent, replace_repeated_field=True)
    for index, raw in enumerate(bent.raw_input_contents):
        if rng.random() < 0.5:
            bent.raw_input_contents[index] = mutate(raw, rng, [raw])
    return bent


def _put(message: Message, field: str, value: object) -> None:
    message.ClearField(field)
    message.MergeFrom(type(message)(**{field: value}))


def _replace_request_field(field: str, values: SearchStrategy[Any]) -> Fault:
    return lambda draw, request: _put(request, field, draw(values))


def _replace_input_field(field: str, values: SearchStrategy[Any]) -> Fault:
    def fault(draw: DrawFn, request: Request) -> None:
        for tensor in request.inputs:
            _put(tensor, field, draw(values))

    return fault


def _change_each_raw(change: Callable[[DrawFn, bytes], bytes]) -> Fault:
    def fault(draw: DrawFn, request: Request) -> None:
        request.raw_input_contents[:] = [change(draw, raw) for raw in request.raw_input_contents]

    return fault


def _set_extreme_shape(draw: DrawFn, request: Request) -> None:
    """Set a shape with no elements, or with more elements than an integer can count."""
    for index, tensor in enumerate(request.inputs):
        tensor.shape[:] = draw(st.permutations([0, 2**62, 1][: max(2, len(tensor.shape))]))
        if index < len(request.raw_input_contents):
            request.raw_input_contents[index] = b""


def _set_wrong_element(draw: DrawFn, request: Request) -> None:
    """Set an element with a valid length that is neither a text nor an image."""
    element = draw(
        st.binary(max_size=64) | st.sampled_from([b"\xff\xfe", b"\xed\xa0\x80", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
    )
    for index in range(len(request.raw_input_contents)):
        request.raw_input_contents[index] = pack_bytes([element])


def _repeat_tensor(draw: DrawFn, request: Request) -> None:
    request.inputs.extend(list(request.inputs))
    if draw(st.booleans()):
        request.raw_input_contents.extend(list(request.raw_input_contents))


def _remove_inputs(draw: DrawFn, request: Request) -> None:
    del request.inputs[:]
    if draw(st.booleans()):
        del request.raw_input_contents[:]


def _use_typed_contents(draw: DrawFn, request: Request) -> None:
    """Replace raw contents by typed contents, mostly of a wrong type."""
    del request.raw_input_contents[:]
    for tensor in request.inputs:
        contents = tensor.contents
        contents.bool_contents[:] = draw(st.lists(st.booleans(), max_size=3))
        contents.int_contents[:] = draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3))
        contents.uint_contents[:] = draw(st.lists(st.integers(0, 2**32 - 1), max_size=3))
        contents.int64_contents[:] = draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3))
        contents.uint64_contents[:] = draw(st.lists(st.integers(0, 2**64 - 1), max_size=3))
        contents.fp32_contents[:] = draw(st.lists(st.floats(width=32), max_size=3))
        contents.fp64_contents[:] = draw(st.lists(st.floats(), max_size=3))
        contents.bytes_contents[:] = draw(st.lists(st.binary(max_size=8), max_size=3))


def _request_wrong_output(draw: DrawFn, request: Request) -> None:
    for _ in range(draw(st.integers(1, 3))):
        request.outputs.add(name=draw(TENSOR_NAMES))


def _add_odd_parameter(draw: DrawFn, request: Request) -> None:
    parameter = request.parameters[draw(st.sampled_from(["timeout", "priority", "sequence_id", "binary_data"]) | TEXT)]
    kind = draw(st.integers(0, 3))
    if kind == 0:
        parameter.int64_param = draw(st.integers(-(2**63), 2**63 - 1))
    elif kind == 1:
        parameter.string_param = draw(TEXT)
    elif kind == 2:
        parameter.bool_param = draw(st.booleans())


FAULTS: Sequence[Fault] = (
    _replace_request_field("model_name", NAMES),
    _replace_request_field("model_version", st.sampled_from(["0", "2", "-1", "1.0", "latest", "١", "9" * 40]) | TEXT),
    _replace_input_field("name", TENSOR_NAMES),
    _replace_input_field("datatype", DATATYPES),
    _replace_input_field("shape", SHAPES),
    _set_extreme_shape,
    _change_each_raw(lambda draw, raw: (raw * 2)[: draw(st.integers(0, 2 * len(raw)))]),
    _change_each_raw(lambda draw, _: draw(FRAMINGS | st.binary(max_size=64))),
    _set_wrong_element,
    _replace_request_field("raw_input_contents", st.lists(st.binary(max_size=8), max_size=4)),
    _repeat_tensor,
    _remove_inputs,
    _use_typed_contents,
    _request_wrong_output,
    _add_odd_parameter,
    _replace_request_field("id", TEXT | st.just("i" * 10_000)),
)
