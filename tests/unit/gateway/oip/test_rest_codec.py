"""The REST codec: exact bodies and error messages."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, InvalidTensor, PenstockError
from penstock.core.requests import InferRequest, InferResponse, Parameter, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import NUMPY_TYPES, Tensor, TensorSpec, from_array, pack_bytes
from penstock.gateway.oip.rest_codec import (
    MAX_CACHED,
    MAX_CACHED_BYTES,
    HeaderCache,
    OutputForm,
    decode_infer,
    decode_parameters,
    decode_raw,
    encode_infer,
)

NOTHING = memoryview(b"")
KNOWN = "UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, BF16, FP32, FP64, BOOL, BYTES"


def item(**changed: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5], **changed}


def behind(size: Any, **changed: Any) -> dict[str, Any]:
    """Return an input whose bytes follow the JSON."""
    found = item(parameters={"binary_data_size": size}, **changed)
    del found["data"]
    return found


def decode(message: Any, binary: bytes = b"") -> tuple[InferRequest, OutputForm]:
    return decode_infer(json.dumps(message).encode(), memoryview(binary))


def refusal(message: Any, binary: bytes = b"") -> PenstockError:
    with pytest.raises(InvalidRequest) as refused:
        decode(message, binary)
    return refused.value


def answer(*outputs: Tensor, request_id: str = "", **parameters: Parameter) -> InferResponse:
    return InferResponse("m", "3", request_id, list(outputs), Timing(), parameters)


def block(*inputs: TensorSpec) -> BlockDescription:
    return BlockDescription("blk-m-1", "m", "1", "onnxruntime_onnx", "fp32", inputs, (), 8, 1, BlockSettings())


# --- requests


def test_every_field_of_a_message_reaches_the_request() -> None:
    message = {
        "id": "r1",
        "inputs": [item(), item(name="n", datatype="INT8", shape=[3], data=[1, 2, 3])],
        "outputs": [{"name": "z"}, {"name": "y", "parameters": {"other": 1}}],
        "parameters": {"b": True, "i": -(2**63), "f": 0.5, "s": ""},
        "unknown": {"keys": "are passed over"},
    }
    request, form = decode(message)
    floats = np.array([1.5, 2.5], np.float32).tobytes()
    assert request.inputs == [Tensor("x", "FP32", (1, 2), floats), Tensor("n", "INT8", (3,), b"\1\2\3")]
    assert (request.request_id, request.outputs, request.size_bytes) == ("r1", ["z", "y"], 11)
    assert request.parameters == {"b": True, "i": -(2**63), "f": 0.5, "s": ""}
    assert (request.model, request.version) == ("", "")
    assert form == OutputForm()


def test_a_minimal_message_is_decoded() -> None:
    request, form = decode({"inputs": [], "outputs": None, "parameters": None})
    assert (request.inputs, request.outputs, request.parameters, request.request_id) == ([], [], {}, "")
    assert form == OutputForm()


def test_only_inputs_may_have_duplicate_names() -> None:
    request, _ = decode({"inputs": [item(), item()]})
    assert [given.name for given in request.inputs] == ["x", "x"]
    error = refusal({"inputs": [], "outputs": [{"name": "y"}, {"name": "y"}]})
    assert error.message == "each of 'outputs' must be an object with a unique 'name'"


def test_binary_tensors_are_views_on_what_follows_the_json() -> None:
    body = memoryview(b"aaaaaaaabbb")
    inputs = [behind(8), item(), behind(0, name="e", shape=[0]), behind(3, name="n", datatype="INT8", shape=[3])]
    request, form = decode_infer(json.dumps({"inputs": inputs}).encode(), body)
    assert [bytes(given.data) for given in request.inputs] == [
        b"a" * 8,
        np.array([1.5, 2.5], np.float32).tobytes(),
        b"",
        b"bbb",
    ]
    data = request.inputs[0].data
    assert isinstance(data, memoryview)
    assert data.obj is body.obj
    assert request.size_bytes == 8 + 8 + 0 + 3
    assert not form.is_binary


def header(**changed: Any) -> bytes:
    inputs = [behind(8), behind(3, name="n", datatype="INT8", shape=[3])]
    outputs = [{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}]
    message = {"inputs": inputs, "outputs": outputs, "parameters": {"p": 1, "binary_data_output": True}}
    return json.dumps({**message, **changed}).encode()


@pytest.mark.parametrize(
    "given",
    [
        header(),
        header(id="r1"),
        header(outputs=[], parameters={}),
        header(inputs=[behind(8), item(), behind(3, datatype="BYTES", shape=[1])]),
        header(inputs=[behind(11, datatype="INT8", shape=[11]), behind(0, name="e", shape=[0])]),
        header(unknown="x" * MAX_CACHED_BYTES),
    ],
)
def test_a_cached_header_decodes_to_the_same_request(given: bytes) -> None:
    known = HeaderCache(Limits())
    for body in (b"aaaaaaaabbb", b"ccccccccddd", b"eeeeeeeefff"):
        found = known.decode(memoryview(given), memoryview(body), None)
        assert found == decode_infer(given, memoryview(body))
        found[0].parameters["added"] = found[0].request_id = "by a holder of the request"
        found[0].outputs.append("w")
    with pytest.raises(InvalidRequest) as refused:
        known.decode(memoryview(given), memoryview(b"too short"), None)
    with pytest.raises(InvalidRequest) as repeated:
        decode_infer(given, memoryview(b"too short"))
    assert refused.value.message == repeated.value.message


def test_the_header_cache_is_limited() -> None:
    known = HeaderCache(Limits())
    for number in range(3 * MAX_CACHED):
        known.decode(memoryview(header(number=number)), memoryview(b"aaaaaaaabbb"), None)
        assert 0 < len(known._cached) <= MAX_CACHED
    for number in range(3):
        known.decode(memoryview(header(id=f"r{number}")), memoryview(b"aaaaaaaabbb"), None)
    assert not any(b"r1" in each for each in known._cached)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_inputs_follow_the_json(datatype: str) -> None:
    data = np.array([0.5, -2], NUMPY_TYPES[datatype]).tobytes()
    assert decode({"inputs": [behind(4, datatype=datatype)]}, data)[0].inputs[0].data == data


def test_binary_bytes_are_not_counted_as_values() -> None:
    """The elements of a BYTES tensor are compared with its shape when they are unpacked."""
    request, _ = decode({"inputs": [behind(3, datatype="BYTES", shape=[7])]}, b"abc")
    assert bytes(request.inputs[0].data) == b"abc"


def test_bytes_are_decoded_from_json() -> None:
    request, _ = decode({"inputs": [item(datatype="BYTES", shape=[2, 1], data=[["zażółć"], [""]])]})
    assert request.inputs == [Tensor("x", "BYTES", (2, 1), pack_bytes(["zażółć", ""]))]


def test_outputs_are_binary_as_requested() -> None:
    outputs = [
        {"name": "a", "parameters": {"binary_data": True}},
        {"name": "b", "parameters": {"binary_data": False}},
        {"name": "c"},
    ]
    request, form = decode({"inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True, "p": 1}})
    assert (form.is_binary, form.by_name, form.targets) == (True, {"a": True, "b": False}, None)
    assert (request.outputs, request.parameters) == (["a", "b", "c"], {"p": 1})


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ([], "the body must be a JSON object"),
        ({}, "'inputs' must be a list of tensors"),
        ({"inputs": {"x": 1}}, "'inputs' must be a list of tensors"),
        ({"inputs": [], "id": 7}, "'id' must be a string of at most 1024 characters"),
        ({"inputs": [], "id": None}, "'id' must be a string of at most 1024 characters"),
        ({"inputs": [], "parameters": []}, "'parameters' must be an object"),
        ({"inputs": [], "parameters": {"binary_data_output": 1}}, "parameter 'binary_data_output' must be a boolean"),
        ({"inputs": [], "outputs": {}}, "'outputs' must be a list"),
        ({"inputs": [], "outputs": ["y"]}, "each of 'outputs' must be an object with a unique 'name'"),
        ({"inputs": [], "outputs": [{"name": ""}]}, "each of 'outputs' must be an object with a unique 'name'"),
        (
            {"inputs": [], "outputs": [{"name": "y" * 257}]},
            "each of 'outputs' must be an object with a unique 'name'",
        ),
        (
            {"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
            "parameter 'classification' of output 'y' is not supported: leave it out",
        ),
        (
            {"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": None}}]},
            "parameter 'binary_data' must be a string, a number or a boolean",
        ),
        (
            {"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            "parameter 'binary_data' must be a boolean",
        ),
    ],
)
def test_invalid_messages_are_refused(message: Any, says: str) -> None:
    error = refusal(message)
    assert (error.code, error.message) == ("invalid_request", says)


def test_invalid_json_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^the body is not JSON: "):
        decode_infer(b'{"inputs": [NaN]}', NOTHING)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (7, "each of 'inputs' must be an object"),
        (item(name=None), "'name' of each input must be a string of at most 256 characters"),
        (item(name="x" * 257), "'name' of each input must be a string of at most 256 characters"),
        (item(datatype="FP128"), f"input 'x' has unknown datatype 'FP128'; known are {KNOWN}"),
        (item(datatype=["FP32"]), f"input 'x' has unknown datatype ['FP32']; known are {KNOWN}"),
        (
            item(datatype="D" * 99),
            f"input 'x' has unknown datatype 'DDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDD; known are {KNOWN}",
        ),
        (item(shape=2), "'shape' of input 'x' must be a list of at most 64 whole numbers"),
        (item(shape=[1] * 65), "'shape' of input 'x' must be a list of at most 64 whole numbers"),
        (item(shape=[-1, 2]), "'shape' of input 'x' has -1, which is not a size"),
        (item(shape=[True]), "'shape' of input 'x' has True, which is not a size"),
        (item(shape=[1.0]), "'shape' of input 'x' has 1.0, which is not a size"),
        (item(shape=[2**63]), "'shape' of input 'x' has 9223372036854775808, which is not a size"),
        (
            item(shape=[2**63 - 1, 0], data=[]),
            "input 'x' has a shape that no array can have: [9223372036854775807, 0]",
        ),
        (item(shape=[3]), "'data' of input 'x' has the shape [2], but 'shape' is [3]"),
        (item(data=[[1], [2]]), "'data' of input 'x' has the shape [2, 1], but 'shape' is [1, 2]"),
        (item(data=None), "'data' of input 'x' must be a list"),
        (item(data=[[1], 2]), "'data' of input 'x' is nested unevenly, or more than 64 deep"),
        (item(data=[[1], [2, 3]]), "'data' of input 'x' is nested unevenly, or more than 64 deep"),
        (item(data=["a", "b"]), "'data' of input 'x' has elements that are not of FP32's kind (float or int)"),
        (item(data=[1, 1e39]), "'data' of input 'x' has values that FP32 cannot hold"),
        (item(datatype="FP16"), "input 'x' is FP16, which JSON cannot hold: send it as binary data"),
        (item(parameters=7), "'parameters' of input 'x' must be an object"),
        (behind("8"), "binary_data_size of input 'x' must be a number of bytes"),
        (behind(True), "binary_data_size of input 'x' must be a number of bytes"),
        (behind(-1), "binary_data_size of input 'x' must be a number of bytes"),
        (behind(9), "binary_data_size of input 'x' is 9, but 8 bytes are left in the body"),
        (behind(4), "input 'x' has 4 bytes of data, but FP32 [1, 2] takes 8"),
        (
            item(parameters={"binary_data_size": 8}),
            "input 'x' has more than one of 'data', binary_data_size and shared_memory_region: send one",
        ),
    ],
)
def test_invalid_inputs_are_refused(given: Any, says: str) -> None:
    error = refusal({"inputs": [given]}, bytes(8))
    assert isinstance(error, InvalidTensor)
    assert (error.code, error.message) == ("invalid_tensor", says)


@pytest.mark.parametrize(("inputs", "claimed"), [([], 0), ([behind(8)], 8), ([item()], 0)])
def test_bytes_beyond_all_inputs_are_refused(inputs: list[Any], claimed: int) -> None:
    error = refusal({"inputs": inputs}, bytes(9))
    assert (error.code, error.message) == (
        "invalid_request",
        f"9 bytes follow the JSON, but the binary_data_size of the inputs add up to {claimed}",
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "parameter 'p' must be a string, a number or a boolean"),
        ([1], "parameter 'p' must be a string, a number or a boolean"),
        ({}, "parameter 'p' must be a string, a number or a boolean"),
        (2**63, "parameter 'p' does not fit into 64 bits"),
        (-(2**63) - 1, "parameter 'p' does not fit into 64 bits"),
    ],
)
def test_invalid_parameters_are_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_parameters({"ok": 1, "p": value})
    assert (refused.value.code, refused.value.message) == ("invalid_request", says)


def test_long_names_of_parameters_are_cut() -> None:
    with pytest.raises(InvalidRequest, match=f"^parameter '{'p' * 80}' must be"):
        decode_parameters({"p" * 1000: None})
    assert decode_parameters(None) == {}


# --- a body that is one tensor


@pytest.mark.parametrize(
    ("spec", "body", "shape"),
    [
        (TensorSpec("x", "FP32", (-1, 2)), bytes(24), (3, 2)),
        (TensorSpec("x", "FP32", (2, -1)), bytes(24), (2, 3)),
        (TensorSpec("x", "INT8", (3,)), b"abc", (3,)),
        (TensorSpec("x", "INT8", (-1,)), b"", (0,)),
        (TensorSpec("x", "INT8", (-1, 0)), b"", (0, 0)),
    ],
)
def test_a_raw_body_is_one_tensor(spec: TensorSpec, body: bytes, shape: tuple[int, ...]) -> None:
    request, form = decode_raw(block(spec), body)
    assert request.inputs == [Tensor("x", spec.datatype, shape, body)]
    assert request.size_bytes == len(body)
    assert form == OutputForm(is_binary=True)


@pytest.mark.parametrize("shape", [(), (-1,), (-1, 1), (-1, -1)])
def test_a_raw_body_for_bytes_is_one_element(shape: tuple[int, ...]) -> None:
    request, _ = decode_raw(block(TensorSpec("x", "BYTES", shape)), b"\xff\0")
    assert request.inputs == [Tensor("x", "BYTES", (1,) * len(shape), b"\2\0\0\0\xff\0")]
    assert request.size_bytes == 6


@pytest.mark.parametrize(
    ("specs", "code", "says"),
    [
        ([], "invalid_request", "model 'm' has 0 inputs: name them in a JSON header"),
        (
            [TensorSpec("a", "INT8", (1,)), TensorSpec("b", "INT8", (1,))],
            "invalid_request",
            "model 'm' has 2 inputs: name them in a JSON header",
        ),
        (
            [TensorSpec("x", "INT8", (-1, -1))],
            "invalid_request",
            "input 'x' has several variable dimensions: send its shape in a JSON header",
        ),
        (
            [TensorSpec("x", "FP32", (-1, 2))],
            "invalid_tensor",
            "input 'x' has 9 bytes of data, but FP32 [1, 2] takes 8",
        ),
        (
            [TensorSpec("x", "INT8", (-1, 0))],
            "invalid_tensor",
            "input 'x' has 9 bytes of data, but INT8 [0, 0] takes 0",
        ),
    ],
)
def test_invalid_raw_bodies_are_refused(specs: list[TensorSpec], code: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_raw(block(*specs), bytes(9))
    assert (refused.value.code, refused.value.message) == (code, says)


# --- answers


def test_an_answer_is_encoded_as_json() -> None:
    outputs = [
        from_array("y", np.array([[1, 2], [3, 4]], np.uint64)),
        from_array("t", np.array([["é"], [""]], dtype=object)),
        from_array("b", np.array([True, False])),
        from_array("n", np.array([np.nan, 0.5], np.float32)),
        from_array("e", np.zeros((0, 3))),
    ]
    body, length = encode_infer(answer(*outputs, request_id="r1"), {}, OutputForm())
    assert length is None
    assert (
        body
        == (
            '{"model_name":"m","model_version":"3","id":"r1","outputs":['
            '{"name":"y","datatype":"UINT64","shape":[2,2],"data":[1,2,3,4]},'
            '{"name":"t","datatype":"BYTES","shape":[2,1],"data":["é",""]},'
            '{"name":"b","datatype":"BOOL","shape":[2],"data":[true,false]},'
            '{"name":"n","datatype":"FP32","shape":[2],"data":[null,0.5]},'
            '{"name":"e","datatype":"FP64","shape":[0,3],"data":[]}]}'
        ).encode()
    )


def test_an_answer_is_encoded_with_binary_tensors() -> None:
    """`by_name` takes precedence; only what is half or infinite is sent as bytes."""
    outputs = [
        Tensor("a", "BF16", (1,), memoryview(b"\1\2")),
        from_array("b", np.array([7], np.int8)),
        from_array("c", np.array([np.inf])),
    ]
    form = OutputForm(is_binary=True, by_name={"b": False, "c": True})
    body, length = encode_infer(answer(*outputs), {}, form)
    assert length is not None
    assert json.loads(body[:length]) == {
        "model_name": "m",
        "model_version": "3",
        "outputs": [
            {"name": "a", "datatype": "BF16", "shape": [1], "parameters": {"binary_data_size": 2}},
            {"name": "b", "datatype": "INT8", "shape": [1], "data": [7]},
            {"name": "c", "datatype": "FP64", "shape": [1], "parameters": {"binary_data_size": 8}},
        ],
    }
    assert body[length:] == b"\1\2" + np.float64(np.inf).tobytes()


def test_an_empty_binary_output_has_a_header_length_too() -> None:
    body, length = encode_infer(answer(Tensor("e", "FP32", (0,), b"")), {}, OutputForm(is_binary=True))
    assert length == len(body)


def test_parameters_of_the_answer_override_those_of_the_request() -> None:
    body, _ = encode_infer(answer(mode=7), {"mode": "fast", "p": 0.5}, OutputForm())
    assert json.loads(body)["parameters"] == {"mode": 7, "p": 0.5}
    assert "parameters" not in json.loads(encode_infer(answer(), {}, OutputForm())[0])


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            Tensor("y", "FP16", (1,), bytes(2)),
            "output 'y' is FP16, which JSON cannot hold: request it with binary_data",
        ),
        (
            from_array("y", np.array([np.inf], np.float32)),
            "output 'y' has infinite values, which JSON cannot hold: request it with binary_data",
        ),
        (
            Tensor("y", "BYTES", (1,), pack_bytes([b"\xff"])),
            "output 'y' has bytes that are not UTF-8, which JSON cannot hold: request it with binary_data",
        ),
    ],
)
def test_answers_that_json_cannot_hold_are_refused(tensor: Tensor, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode_infer(answer(tensor), {}, OutputForm())
    assert (refused.value.code, refused.value.message) == ("invalid_request", says)
