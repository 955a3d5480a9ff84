"""Arbitrary packets become requests or typed errors, and arbitrary outputs become answers that can be sent."""

import json
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.core.packets import PACKET_SPECS, PacketFile
from penstock.core.requests import InferRequest, InferResponse, PacketFields, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec, from_array, unpack_bytes
from penstock.gateway.blocks.block_grpc import create_packet_reader, decode_packet, encode_packet
from penstock.gateway.blocks.packet import check_packet
from penstock.gateway.blocks.packet_answer import make_answer_parts
from penstock.gateway.blocks.packet_calls import make_answer_body
from penstock.gateway.blocks.packet_inputs import PacketInputs
from penstock.gateway.blocks.packet_rest import parse_form, parse_packet
from penstock.gateway.v1.multipart import FormPart
from penstock.pb.blocks import inference_pb2 as pb
from penstock.serving.admission import Admission
from tests.fuzzing import fuzz

LIMITS = Limits()


def block(task: str, inputs: tuple[TensorSpec, ...], **more: Any) -> BlockDescription:
    found = BlockSettings(task=task, **more)
    outputs = (TensorSpec("y", "FP32", (-1,)),)
    return BlockDescription("blk-1", "m", "1", "onnx", "fp32", inputs, outputs, 0, 1, found)


TEXT, IMAGE = TensorSpec("text", "BYTES", (-1, 1)), TensorSpec("image", "BYTES", (-1, 1))
BLOCKS = (
    block("embed", (TEXT,)),
    block("score", (TensorSpec("query", "BYTES", (-1, 1)), TensorSpec("passage", "BYTES", (-1, 1)))),
    block("upscale", (IMAGE,)),
    block("classify", (IMAGE,)),
    block("generate", (TensorSpec("text_input", "BYTES", (-1,)), TensorSpec("messages", "BYTES", (1,), True))),
    block("tensor", (TensorSpec("x", "FP32", (-1, -1)), TensorSpec("k", "INT64", (2,)))),
    block("tensor", (TensorSpec("x", "BF16", ()), TensorSpec("b", "BOOL", (0, 3)))),
    block("tensor", PACKET_SPECS, takes_packets=True),
)
KEYS = ("b64", "session_id", "seq_no", "graph", "outputs", "text", "x", "inputs", "parameters", "mode")
NAMES = ("text", "query", "passage", "image", "text_input", "messages", "x", "k", "b", "inputs", "parameters", "mode")
BODY = ("block_id", "model", "session_id", "data", "files", "seq_no", "graph")
PARTS = ("block_id", "session_id", "seq_no", "ts", "a", "a_metadata", "a_metadata_metadata", "data")
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("async")
values = st.recursive(
    scalars,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inside, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), values, max_size=5).map(json.dumps)
texts = st.one_of(objects, st.text(max_size=30), st.just(""), values.map(json.dumps))
numbers = st.integers(-2, 2**64 + 1)


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return a value as the server reads it from JSON: numbers have at most 64 bits."""
    try:
        found: dict[str, Any] = orjson.loads(json.dumps(value))
    except ValueError:
        return {}
    return found


metadata = st.dictionaries(st.sampled_from(("input", "shape", "file_name")), values, max_size=3)
files = st.lists(st.builds(PacketFile, metadata.map(plain), st.binary(max_size=40)), max_size=4)


@fuzz
@given(st.sampled_from(BLOCKS), st.text(max_size=300), numbers, st.floats(), texts, texts, texts, st.binary(), files)
def test_any_packet_is_a_request_or_a_typed_error(
    block: BlockDescription,
    session: str,
    seq_no: int,
    ts: float,
    data: str,
    query: str,
    graph: str,
    frame: bytes,
    files: Any,
) -> None:
    encoded = data.encode("utf-8", "replace")
    with suppress(PenstockError):
        check_packet("m", PacketFields(session, seq_no, ts, encoded, query, graph, frame), files, 1.0, LIMITS)
    fields = PacketFields("s", 1, 1.0, encoded)
    inputs = PacketInputs(check_packet("m", fields, files, 1.0, LIMITS), LIMITS)
    assert inputs.is_async in (True, False)
    request = InferRequest("m", [])
    try:
        inputs.bind(request, block)
    except PenstockError:
        return
    assert request.parameters["session_id"] == "s"
    for tensor in request.inputs:
        if tensor.datatype == "BYTES":
            unpack_bytes(tensor)


@fuzz
@given(st.binary(max_size=200))
def test_any_message_is_a_packet_or_a_typed_error(data: bytes) -> None:
    read = create_packet_reader(LIMITS, Admission(LIMITS))
    for each in (data, data + b"\x4a\x80\x80\x04" + bytes(65_536)):
        found = read(each)
        assert isinstance(found, pb.BlockInferencePacket | PenstockError), found


VALID = pb.BlockInferencePacket(
    block_id="blk-1",
    session_id="sess-12345",
    seq_no=2**63,
    data='{"text": ["a"], "inputs": {"x": [[1.5]]}, "parameters": {"k": 1}}',
    ts=1.5,
    query_parameters="{}",
    output_ptr='{"graph": {"blk-1": []}}',
    files=[pb.FileInfo(metadata='{"input": "image", "shape": [1]}', file_data=b"\xff\xd8")],
).SerializeToString()
changes = st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4)


@fuzz
@given(st.sampled_from(BLOCKS), changes, st.integers(0, 3))
def test_a_damaged_message_is_a_request_or_a_typed_error(
    block: BlockDescription, changes: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(VALID)
    for at, byte in changes:
        damaged[at] = byte
    found = create_packet_reader(LIMITS, Admission(LIMITS))(bytes(damaged[: len(damaged) - cut]))
    if isinstance(found, PenstockError):
        return
    assert isinstance(found, pb.BlockInferencePacket)
    with suppress(PenstockError):
        inputs = PacketInputs(decode_packet(found, 1.0, LIMITS), LIMITS)
        inputs.bind(InferRequest("m", []), block)


@fuzz
@given(st.dictionaries(st.sampled_from(BODY), values))
def test_any_json_body_is_a_packet_or_a_typed_error(body: dict[str, Any]) -> None:
    try:
        message = orjson.loads(json.dumps(body, allow_nan=False))
    except ValueError:
        return  # no JSON
    with suppress(PenstockError):
        parse_packet(message, LIMITS)


@fuzz
@given(
    st.lists(
        st.builds(
            FormPart,
            st.sampled_from(PARTS),
            st.booleans(),
            st.binary(max_size=12),
        ),
        max_size=6,
    )
)
def test_any_form_is_a_packet_or_a_typed_error(parts: list[FormPart]) -> None:
    with suppress(PenstockError):
        parse_packet(parse_form(parts), LIMITS)


elements = st.lists(st.binary(max_size=8), max_size=4)
floats = st.lists(st.floats(width=32), max_size=4)


@fuzz
@given(st.sampled_from(BLOCKS[:-1]), elements, floats, files, st.booleans())
def test_any_outputs_are_an_answer(
    block: BlockDescription, elements: list[bytes], floats: list[float], files: Any, is_chat: bool
) -> None:
    column = np.empty(len(elements), dtype=object)
    column[:] = elements
    with np.errstate(over="ignore"):
        halves = from_array("h", np.array(floats, np.float32).astype(np.float16))
    outputs = [from_array("image", column), from_array("y", np.array(floats, np.float32)), halves]
    parts = make_answer_parts(InferResponse("m", "1", "", outputs, Timing()), block, files, is_chat, LIMITS)
    fields = PacketFields("s", 2**64 - 1)
    packet = encode_packet(fields, parts, 1.0)
    assert packet.seq_no == 2**64 - 1
    assert json.loads(packet.data) == orjson.loads(orjson.dumps(make_answer_body(fields, parts, 1.0)))["data"]
    assert len(packet.SerializeToString()) > 0


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"inputs": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"parameters": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}",
    ],
)
def test_deep_nesting_is_a_typed_error(data: bytes) -> None:
    for each in BLOCKS[:-1]:
        inputs = PacketInputs(check_packet("m", PacketFields("s", 1, 1.0, data), [], 1.0, LIMITS), LIMITS)
        with pytest.raises(PenstockError):
            inputs.bind(InferRequest("m", []), each)
