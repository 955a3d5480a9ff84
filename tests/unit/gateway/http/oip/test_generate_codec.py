"""Triton's generate extension: flat JSON to requests, and answers to flat JSON."""

from typing import Any

import numpy as np
import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, InvalidTensor, PenstockError, RequestTooLarge
from penstock.core.requests import InferResponse, Parameter, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import BYTES, Tensor, TensorSpec, from_array, to_array
from penstock.gateway.http.oip.generate_codec import decode_generate, encode_generate


def block(*inputs: tuple[str, str, tuple[int, ...]]) -> BlockDescription:
    specs = tuple(TensorSpec(*each) for each in inputs)
    return BlockDescription("blk-m", "m", "1", "p", "fp32", specs, (), 0, 1, BlockSettings(task="generate"))


WRITER = block(
    ("text_input", BYTES, (-1,)),
    ("messages", BYTES, (1,)),
    ("stream", "BOOL", (1,)),
    ("sampling_parameters", BYTES, (1,)),
    ("input_ids", "INT64", (-1,)),
)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def values(tensor: Tensor) -> Any:
    return to_array(tensor).tolist()


def decoded(message: dict[str, Any], of: BlockDescription = WRITER) -> tuple[dict[str, Any], dict[str, Parameter]]:
    request = decode_generate(message, of)
    return {tensor.name: values(tensor) for tensor in request.inputs}, request.parameters


def test_inputs_by_name_and_everything_else_as_parameters() -> None:
    inputs, parameters = decoded({"text_input": "Water", "stream": True, "temperature": 0, "user": "me", "seed": None})
    assert inputs == {"text_input": [b"Water"], "stream": [True]}
    assert parameters == {"temperature": 0, "user": "me"}


def test_parameters_may_hold_inputs_too() -> None:
    message = {"text_input": ["a", "b"], "parameters": {"stream": False, "max_tokens": 3, "top_p": 0.5}}
    inputs, parameters = decoded(message)
    assert inputs == {"text_input": [b"a", b"b"], "stream": [False]}
    assert parameters == {"max_tokens": 3, "top_p": 0.5}
    assert decoded({"text_input": "a", "parameters": None})[1] == {}


def test_objects_and_lists_become_json_text() -> None:
    chat = [{"role": "user", "content": "hé"}]
    inputs, parameters = decoded({"messages": chat, "sampling_parameters": {"n": 2}, "stop": ["a", "b"]})
    assert inputs["messages"] == ['[{"role":"user","content":"hé"}]'.encode()]
    assert inputs["sampling_parameters"] == [b'{"n":2}']
    assert parameters == {"stop": '["a","b"]'}
    assert decoded({"messages": "[]"})[0] == {"messages": [b"[]"]}


def test_ids() -> None:
    request = decode_generate({"text_input": "a", "id": "mine"}, WRITER)
    assert (request.request_id, request.parameters) == ("mine", {})
    assert decoded({"id": 3}, block(("id", "INT32", (1,))))[0] == {"id": [3]}


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ((-1,), 7, [7]),
        ((1,), 7, [7]),
        ((), 7, 7),
        ((-1, 1), [1, 2], [[1], [2]]),
        ((-1, -1), [1, 2], [[1, 2]]),
        ((-1, 2), [1, 2, 3, 4], [[1, 2], [3, 4]]),
        ((-1, 2), [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    ],
)
def test_elements_fill_shapes_as_triton_fills_them(shape: tuple[int, ...], value: Any, expected: Any) -> None:
    assert decoded({"x": value}, block(("x", "INT32", shape)))[0] == {"x": expected}


@pytest.mark.parametrize(
    ("message", "error", "said"),
    [
        ({"text_input": "a", "parameters": {"text_input": "b"}}, InvalidRequest, "given twice"),
        ({"text_input": "a", "parameters": [1]}, InvalidRequest, "must be an object"),
        ({"text_input": 3}, InvalidTensor, "kind"),
        ({"messages": ["a", "b"]}, InvalidTensor, "do not fill [1]"),
        ({"input_ids": [1, [2]]}, InvalidTensor, "nested"),
        ({"id": 7}, InvalidRequest, "'id' must be a string"),
        ({"messages": [{"a": nested(300)}]}, InvalidRequest, "cannot be passed on as JSON text"),
        ({f"p{number}": 1 for number in range(2000)}, RequestTooLarge, "limits.max_parameters"),
    ],
)
def test_what_is_wrong_is_said(message: dict[str, Any], error: type[PenstockError], said: str) -> None:
    with pytest.raises(error, match=said.replace("[", r"\[")):
        decode_generate(message, WRITER, Limits())


def test_one_element_is_itself_and_others_are_lists() -> None:
    outputs = [
        from_array("text_output", np.array([b"so"], object)),
        from_array("usage", np.array([3, 4, -1], np.int32)),
        from_array("score", np.array([[0.5]], np.float32)),
        from_array("rows", np.array([[1, 2], [3, 4]], np.int64)),
    ]
    response = InferResponse("m", "2", "r", outputs, Timing(), {"tokens": 7})
    found = encode_generate(response, has_id=True)
    assert {name: np.asarray(value).tolist() for name, value in found.items()} == {
        "model_name": "m",
        "model_version": "2",
        "id": "r",
        "tokens": 7,
        "text_output": "so",
        "usage": [3, 4, -1],
        "score": 0.5,
        "rows": [1, 2, 3, 4],
    }
    assert "id" not in encode_generate(response, has_id=False)
