"""The messages of a WebSocket: text, binary, raw and invalid ones."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest, InvalidTensor, PenstockError, QueueFull, RateLimited
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import Tensor, TensorSpec, pack_bytes
from penstock.endpoints.http.websocket_protocol import Utf8
from penstock.gateway.oip.rest_codec import OutputForm
from penstock.gateway.websocket.websocket_codec import (
    Message,
    RawForm,
    decode_message,
    encode_answer,
    encode_error,
    find_id,
    split_message,
)
from penstock.gateway.websocket.websocket_routes import StreamOptions, read_options

X = np.array([[1.5, -2.0]], np.float32)
NUMBERS = {"name": "x", "datatype": "FP32", "shape": [1, 2]}


def utf8(raw: bytes) -> Message:
    return Utf8(raw)


def text(**more: Any) -> Message:
    return utf8(json.dumps({"inputs": [{**NUMBERS, "data": [1.5, -2.0]}], **more}).encode())


def binary(header: dict[str, Any], *tensors: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(4, "little") + raw + b"".join(tensors)


def binary_x(**more: Any) -> bytes:
    return binary({"inputs": [{**NUMBERS, "parameters": {"binary_data_size": 8}}], **more}, X.tobytes())


def response(*outputs: Tensor, request_id: str = "7") -> InferResponse:
    return InferResponse("m", "1", request_id, list(outputs), Timing())


Y = Tensor("y", "FP32", (1, 2), X.tobytes())


def answer(message: Message) -> Message:
    request, form = decode_message(message)
    return encode_answer(response(Y), request, form, isinstance(message, Utf8))


def test_text_messages_have_rests_json() -> None:
    request, form = decode_message(text(id="7", parameters={"mode": "fast"}))
    assert (request.request_id, request.parameters, form.is_binary) == ("7", {"mode": "fast"}, False)
    np.testing.assert_array_equal(np.frombuffer(request.inputs[0].data, np.float32), X[0])
    found = answer(text(id="7"))
    assert isinstance(found, Utf8)
    assert json.loads(bytes(found)) == {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2.0]}],
    }


def test_binary_messages_have_tensors_after_the_json() -> None:
    request, form = decode_message(binary_x(id="7"))
    assert (request.request_id, form.is_binary) == ("7", True)
    assert bytes(request.inputs[0].data) == X.tobytes()
    found = answer(binary_x(id="7"))
    assert isinstance(found, bytes)
    header, tensors = split_message(found)
    assert json.loads(bytes(header))["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert bytes(tensors) == X.tobytes()


def test_a_binary_answer_may_have_a_json_output() -> None:
    found = answer(binary_x(outputs=[{"name": "y", "parameters": {"binary_data": False}}]))
    assert isinstance(found, bytes)
    header, tensors = split_message(found)
    assert json.loads(bytes(header))["outputs"][0]["data"] == [1.5, -2.0]
    assert not tensors


def test_text_with_binary_outputs_gets_a_binary_answer() -> None:
    found = answer(text(parameters={"binary_data_output": True}))
    assert isinstance(found, bytes)
    assert bytes(split_message(found)[1]) == X.tobytes()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (utf8(b""), "not JSON"),
        (utf8(b"[]"), "must be a JSON object"),
        (utf8(b"{}"), "'inputs' must be a list"),
        (text(id=7), "'id' must be a string"),
        (b"", "start with the length"),
        (b"\x01\x00", "start with the length"),
        (b"\xff\xff\xff\xff{}", "start with the length"),
        (b"\x02\x00\x00\x00{}", "'inputs' must be a list"),
        (binary({"inputs": []}, b"more"), "4 bytes follow"),
        (binary({"inputs": [{**NUMBERS, "parameters": {"binary_data_size": 8}}]}, b"few"), "is 8, but"),
    ],
    ids=repr,
)
def test_invalid_messages_are_refused(message: Message, says: str) -> None:
    with pytest.raises(PenstockError, match=says):
        decode_message(message)


@pytest.mark.parametrize(
    ("message", "request_id"),
    [
        (utf8(b'{"id": "a", "inputs": 3}'), "a"),
        (utf8(b'{"id": 3}'), ""),
        (utf8(b"[1]"), ""),
        (utf8(b"{"), ""),
        (binary({"id": "b"}), "b"),
        (b"\xff", ""),
        (utf8(json.dumps({"id": "x" * 10_000}).encode()), ""),
        (text(id="large", parameters={"a": "a" * 2**16}), ""),
    ],
    ids=repr,
)
def test_the_id_of_an_invalid_message_is_found(message: Message, request_id: str) -> None:
    assert find_id(message) == request_id


def test_errors_have_message_code_and_id() -> None:
    told = {"error": "full", "code": "queue_full", "id": "7", "retry_after_s": 1.0}
    assert json.loads(bytes(encode_error(QueueFull("full"), "7"))) == told
    told = {"error": "wait", "code": "rate_limited", "id": "7", "retry_after_s": 0.25, "limit": "rows"}
    error = RateLimited("wait", limit="rows", retry_after_s="0.25")
    assert json.loads(bytes(encode_error(error, "7"))) == told


def test_raw_messages_are_one_element_each() -> None:
    form = RawForm("image", "larger")
    for message in (b"\x89PNG", utf8(b"text")):
        request = form.decode(message, 2)
        (tensor,) = request.inputs
        assert (tensor.name, tensor.datatype, tensor.shape) == ("image", "BYTES", (1, 1))
        assert tensor.data == pack_bytes([message])
        assert (request.outputs, request.size_bytes) == (["larger"], 4 + len(message))


def test_raw_answers_are_one_output() -> None:
    images = Tensor("larger", "BYTES", (2, 1), pack_bytes([b"one", b"two"]))
    assert RawForm("image", "larger").encode(response(Y, images)) == b"one"
    assert RawForm("image", "y").encode(response(Y, images)) == X.tobytes()
    assert RawForm("image", "none").encode(response(Tensor("none", "BYTES", (0,), b""))) == b""
    with pytest.raises(InvalidRequest, match="returned no output 'other'"):
        RawForm("image", "other").encode(response(Y))


def test_raw_names_are_checked_against_the_model() -> None:
    inputs = (TensorSpec("image", "BYTES", (-1, 1)), TensorSpec("x", "FP32", (-1,)))
    outputs = (TensorSpec("image", "BYTES", (-1, 1)),)
    block = BlockDescription("blk-1", "m", "1", "p", "fp32", inputs, outputs, 8, 1, BlockSettings())
    RawForm("image", "image").check(block)
    with pytest.raises(InvalidRequest, match="no BYTES input 'x'; it has: image"):
        RawForm("x", "image").check(block)
    with pytest.raises(InvalidRequest, match="no output 'y'; it has: image"):
        RawForm("image", "y").check(block)


def test_options_in_the_query_are_read() -> None:
    assert read_options({}) == StreamOptions(is_ordered=True, raw=None)
    assert read_options({"ordered": "false"}) == StreamOptions(is_ordered=False)
    assert read_options({"input": "a", "output": "b"}) == StreamOptions(raw=RawForm("a", "b"))
    raw = read_options({"input": "a", "output": "b", "mode": "denoise", "quality": "80"}).raw
    assert raw is not None
    assert raw.decode(b"x", 1).parameters == {"mode": "denoise", "quality": 80}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"ordred": "false"}, "parameter 'ordred'"),
        ({"ordered": "no"}, "true or false"),
        ({"input": "a"}, "need both"),
        ({"mode": "denoise"}, "'mode' is only for raw messages"),
        ({"output": "a"}, "need both"),
        ({"input": "a", "output": "b", "ordered": "false"}, "have no ids, so"),
    ],
)
def test_invalid_options_are_refused(query: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_options(query)


def test_an_answer_that_json_cannot_hold_is_refused() -> None:
    half = Tensor("y", "FP16", (1,), b"\x00\x00")
    with pytest.raises(InvalidRequest, match="binary_data"):
        encode_answer(response(half), InferRequest("m", []), OutputForm(), is_text=True)


def test_an_invalid_tensor_has_its_own_code() -> None:
    with pytest.raises(InvalidTensor, match="unknown datatype"):
        decode_message(utf8(b'{"inputs": [{"name": "x", "datatype": "FP31", "shape": [1], "data": [1]}]}'))
