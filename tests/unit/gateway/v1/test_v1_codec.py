"""The codec of plain values: to tensors by the model's inputs, and back."""

import base64
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.requests import InferResponse, Parameter, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import NUMPY_TYPES, Tensor, TensorSpec, from_array, pack_bytes
from penstock.gateway.v1.multipart import FormPart
from penstock.gateway.v1.v1_codec import decode, encode, read_form_inputs
from penstock.gateway.v1.v1_schemas import V1InferBody

PNG = b"\x89PNG\r\n\x1a\n\xff\0"
PAIR = (TensorSpec("text", "BYTES", (-1, 1)), TensorSpec("n", "FP32", (-1, 2)))


def block(*inputs: TensorSpec) -> BlockDescription:
    return BlockDescription("blk-m-1", "m", "1", "onnxruntime_onnx", "fp32", inputs, (), 8, 1, BlockSettings())


def body(inputs: Any, **more: Any) -> V1InferBody:
    return V1InferBody(model="m", inputs=inputs, **more)


def tensor(datatype: str, shape: tuple[int, ...], value: Any) -> Tensor:
    return decode(body({"x": value}), block(TensorSpec("x", datatype, shape))).inputs[0]


def answer(*outputs: Tensor, **parameters: Parameter) -> InferResponse:
    return InferResponse("m", "3", "r1", list(outputs), Timing(), parameters)


def shown(*outputs: Tensor, **parameters: Parameter) -> Any:
    return orjson.loads(orjson.dumps(encode(answer(*outputs, **parameters), True), option=orjson.OPT_SERIALIZE_NUMPY))


# --- requests


def test_every_field_of_a_message_reaches_the_request() -> None:
    message = body({"n": [[1, 2]], "text": "é"}, version="2", id="r1", outputs=["z", "y"], parameters={"p": 0.5})
    request = decode(message, block(*PAIR))
    assert request.inputs == [
        Tensor("n", "FP32", (1, 2), np.array([1, 2], np.float32).tobytes()),
        Tensor("text", "BYTES", (1, 1), pack_bytes(["é"])),
    ]
    assert (request.model, request.version, request.request_id) == ("m", "2", "r1")
    assert (request.outputs, request.parameters) == (["z", "y"], {"p": 0.5})


def test_a_minimal_message_is_decoded() -> None:
    request = decode(body({}), block(*PAIR))
    assert (request.inputs, request.outputs, request.parameters, request.version) == ([], [], {}, "")


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_values_of_every_datatype_are_converted(datatype: str) -> None:
    values: list[Any] = [True, False] if datatype == "BOOL" else [1, 0]
    expected = np.array(values).astype(NUMPY_TYPES[datatype]).tobytes()
    assert tensor(datatype, (-1,), values) == Tensor("x", datatype, (2,), expected)


@pytest.mark.parametrize(
    ("spec", "value", "shape"),
    [
        ((), 7, ()),
        ((-1,), 7, (1,)),
        ((-1, 1, 1), 7, (1, 1, 1)),
        ((-1, 2), 7, (1, 1)),  # a wrong value is refused when the request is admitted
        ((-1, 1), [1, 2], (2, 1)),
        ((-1, 1, 1), [1, 2], (2, 1, 1)),
        ((-1, 2), [1, 2], (2,)),
        ((-1, -1), [1, 2], (2,)),
        ((-1, 2, 1), [[1, 2]], (1, 2, 1)),
        ((-1,), [[1, 2]], (1, 2)),
        ((-1,), [], (0,)),
        ((-1, 1), [], (0, 1)),
    ],
)
def test_trailing_dimensions_of_one_are_added(spec: tuple[int, ...], value: Any, shape: tuple[int, ...]) -> None:
    assert tensor("INT8", spec, value).shape == shape


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        ("é", ["é"]),
        ({"b64": base64.b64encode(PNG).decode()}, [PNG]),
        ({"b64": ""}, [b""]),
        (["a", {"b64": "/wA="}], ["a", b"\xff\0"]),
        ([["a"], ["b"]], ["a", "b"]),
    ],
)
def test_bytes_are_read_as_text_or_base64(value: Any, elements: list[bytes | str]) -> None:
    assert tensor("BYTES", (-1, 1), value) == Tensor("x", "BYTES", (len(elements), 1), pack_bytes(elements))


@pytest.mark.parametrize(
    ("datatype", "value", "says"),
    [
        ("INT8", "a", "'data' of input 'x' has elements that are not of INT8's kind (int)"),
        ("INT8", None, "'data' of input 'x' has elements that are not of INT8's kind (int)"),
        ("INT8", {"b64": "AA=="}, "'data' of input 'x' has elements that are not of INT8's kind (int)"),
        ("INT8", [128], "'data' of input 'x' has values that INT8 cannot hold"),
        ("FP16", [1e300], "'data' of input 'x' has values that FP16 cannot hold"),
        ("FP32", [[1], [2, 3]], "'data' of input 'x' is nested unevenly, or more than 64 deep"),
        ("BYTES", 7, "'data' of input 'x' has elements that are not of BYTES's kind (string"),
        ("BYTES", {"b65": "AA=="}, "an element of input 'x' is an object other than {'b64': …}"),
        ("BYTES", {"b64": 7}, "an element of input 'x' is an object other than {'b64': …}"),
        ("BYTES", [{"b64": "AA==", "more": 1}], "an element of input 'x' is an object other than {'b64': …}"),
        ("BYTES", {"b64": "%%"}, "an element of input 'x' is not base64: Only base64 data is allowed"),
        ("BYTES", {"b64": "A"}, "an element of input 'x' is not base64: "),
    ],
)
def test_invalid_values_are_refused(datatype: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidTensor) as refused:
        tensor(datatype, (-1,), value)
    assert refused.value.code == "invalid_tensor"
    assert refused.value.message.startswith(says)


def test_unknown_inputs_are_refused() -> None:
    with pytest.raises(InvalidTensor) as refused:
        decode(body({"y" * 99: 1}), block(*PAIR))
    assert refused.value.message == f"unknown input '{'y' * 80}'; the model takes text, n"


def test_tensors_of_the_protocol_are_accepted() -> None:
    """Tensors have their own datatype and shape, so the model's specification is not used."""
    given = {"name": "any", "datatype": "INT8", "shape": [2], "data": [1, 2]}
    assert decode(body([given, given]), block(*PAIR)).inputs == [Tensor("any", "INT8", (2,), b"\1\2")] * 2
    with pytest.raises(
        InvalidTensor, match=r"^binary_data_size of input 'any' is 2, but 0 bytes are left in the body$"
    ):
        decode(
            body([{"name": "any", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}}]), block()
        )
    with pytest.raises(InvalidTensor, match=r"^each of 'inputs' must be an object$"):
        decode(body([7]), block())


def test_invalid_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^parameter 'p' does not fit into 64 bits$"):
        decode(body({}, parameters={"p": 2**63}), block())


# --- forms


def test_files_and_fields_become_inputs() -> None:
    parts = [
        FormPart("text", True, PNG),
        FormPart("n", False, b"[[1, 2.5]]"),
        FormPart("text", False, "é".encode()),
    ]
    assert read_form_inputs(block(*PAIR), parts) == {"text": [PNG, "é".encode()], "n": [[1, 2.5]]}
    assert read_form_inputs(block(*PAIR), []) == {}


def test_images_of_a_form_become_elements() -> None:
    inputs = read_form_inputs(block(*PAIR), [FormPart("text", True, PNG), FormPart("text", True, b"")])
    assert decode(body(inputs), block(*PAIR)).inputs == [Tensor("text", "BYTES", (2, 1), pack_bytes([PNG, b""]))]


def test_a_file_for_numbers_is_refused_when_it_is_packed() -> None:
    inputs = read_form_inputs(block(*PAIR), [FormPart("n", True, b"1")])
    assert inputs == {"n": [b"1"]}
    with pytest.raises(InvalidTensor, match="not of FP32's kind"):
        decode(body(inputs), block(*PAIR))


@pytest.mark.parametrize(
    ("parts", "code", "says"),
    [
        ([FormPart("y", False, b"1")], "invalid_tensor", "unknown input 'y'; the model takes text, n"),
        ([FormPart("n", False, b"1"), FormPart("n", False, b"2")], "invalid_tensor", "input 'n' is given twice"),
        ([FormPart("n", True, b"1"), FormPart("n", False, b"2")], "invalid_tensor", "input 'n' is given twice"),
        ([FormPart("n", False, b"{")], "invalid_request", "the body is not JSON: "),
    ],
)
def test_invalid_forms_are_refused(parts: list[FormPart], code: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_form_inputs(block(*PAIR), parts)
    assert refused.value.code == code
    assert refused.value.message.startswith(says)


def test_an_unknown_file_name_is_refused_when_decoded() -> None:
    inputs = read_form_inputs(block(*PAIR), [FormPart("y", True, b"1")])
    with pytest.raises(InvalidTensor, match="unknown input 'y'"):
        decode(body(inputs), block(*PAIR))


# --- answers


def test_an_answer_to_named_inputs_is_a_map() -> None:
    outputs = [
        from_array("y", np.array([[1, 2], [3, 4]], np.int64)),
        from_array("n", np.array([np.nan, 0.5], np.float32)),
        from_array("b", np.array([[True]])),
        from_array("s", np.array(7, np.uint8)),
        from_array("e", np.zeros((2, 0))),
    ]
    assert shown(*outputs) == {
        "model": "m",
        "version": "3",
        "id": "r1",
        "outputs": {"y": [[1, 2], [3, 4]], "n": [None, 0.5], "b": [[True]], "s": 7, "e": [[], []]},
    }
    assert shown(tokens=7)["parameters"] == {"tokens": 7}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_outputs_are_numbers(dtype: Any) -> None:
    assert shown(from_array("y", np.array([[0.5, -2]], dtype)))["outputs"] == {"y": [[0.5, -2.0]]}


def test_bytes_are_text_if_they_are_utf8() -> None:
    output = from_array("t", np.array([["é", PNG], [b"", b"\xff"]], dtype=object))
    assert shown(output)["outputs"] == {"t": [["é", {"b64": base64.b64encode(PNG).decode()}], ["", {"b64": "/w=="}]]}


def test_an_answer_to_tensors_has_tensors() -> None:
    encoded = encode(answer(from_array("y", np.array([[1, 2]], np.int8)), tokens=7), False)
    assert orjson.loads(orjson.dumps(encoded, option=orjson.OPT_SERIALIZE_NUMPY)) == {
        "model": "m",
        "version": "3",
        "id": "r1",
        "parameters": {"tokens": 7},
        "outputs": [{"name": "y", "datatype": "INT8", "shape": [1, 2], "data": [1, 2]}],
    }


@pytest.mark.parametrize("is_map", [True, False])
def test_infinity_is_refused(is_map: bool) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode(answer(from_array("y", np.array([np.inf]))), is_map)
    assert refused.value.message == (
        "output 'y' has infinite values, which JSON cannot hold: request it with binary_data"
    )


def test_only_plain_values_can_hold_half_precision_and_binary_bytes() -> None:
    for output, says in [
        (from_array("y", np.array([1], np.float16)), "output 'y' is FP16"),
        (from_array("y", np.array([b"\xff"], dtype=object)), "output 'y' has bytes that are not UTF-8"),
    ]:
        with pytest.raises(InvalidRequest, match=says):
            encode(answer(output), False)
