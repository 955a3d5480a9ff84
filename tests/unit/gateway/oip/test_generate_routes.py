"""Triton's generate extension over HTTP: whole answers, and events as they come."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import EngineFailed, InvalidRequest, InvalidTensor, PenstockError, QueueFull, RequestTooLarge
from penstock.core.requests import InferRequest, InferResponse, Parameter, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import BYTES, Tensor, TensorSpec, from_array, to_array
from penstock.gateway.oip.generate_routes import decode_generate, encode_generate
from tests.unit.conftest import BLOCKS

GENERATE, STREAM = "/v2/models/writer/generate", "/v2/models/writer/generate_stream"


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


def test_keys_are_inputs_by_name_and_parameters_otherwise() -> None:
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


def test_ids_are_returned() -> None:
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
        ({"messages": ["a", "b"]}, InvalidTensor, "do not fit the shape [1]"),
        ({"input_ids": [1, [2]]}, InvalidTensor, "nested"),
        ({"id": 7}, InvalidRequest, "'id' must be a string"),
        ({"messages": [{"a": nested(300)}]}, InvalidRequest, "cannot be converted to JSON text"),
        ({f"p{number}": 1 for number in range(2000)}, RequestTooLarge, "2000 parameters, over the limit of 1024"),
    ],
)
def test_invalid_messages_are_refused(message: dict[str, Any], error: type[PenstockError], said: str) -> None:
    with pytest.raises(error, match=said.replace("[", r"\[")):
        decode_generate(message, WRITER, Limits())


def test_one_element_is_a_plain_value_and_several_are_a_list() -> None:
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


def part(text: str, is_final: bool = False) -> InferResponse:
    outputs = [from_array("text_output", np.array([text.encode()], object))] if text else []
    return InferResponse("writer", "1", "r", outputs, Timing(), is_final=is_final)


def events(body: bytes) -> list[Any]:
    *found, rest = body.split(b"\n\n")
    assert rest == b""
    return [json.loads(each.removeprefix(b"data: ")) for each in found]


async def test_a_whole_answer_is_returned(client, served):
    served.serving.answer = lambda request: part("and so on", is_final=True)
    body = b'{"text_input": "Once", "parameters": {"max_tokens": 4}, "temperature": 0}'
    form = {"content-type": "application/x-www-form-urlencoded"}  # as curl says it
    answer = await client.post(GENERATE, content=body, headers=form)
    assert answer.json() == {"model_name": "writer", "model_version": "1", "text_output": "and so on"}
    asked: InferRequest = served.serving.last
    assert (asked.model, asked.version, asked.protocol) == ("writer", "", "rest")
    assert asked.parameters == {"max_tokens": 4, "temperature": 0}
    assert "x-request-id" in answer.headers


async def test_any_model_supports_generate(client, served):
    answer = await client.post("/v2/models/echo/versions/2/generate", json={"x": [1, 2]})
    assert answer.json() == {"model_name": "echo", "model_version": "2", "x": [1.0, 2.0]}
    served.serving.parts = [part("once", is_final=True)]
    answer = await client.post("/v2/models/embedder/generate_stream", json={"text": "a"})
    assert [each["text_output"] for each in events(answer.content)] == ["once"]


async def test_events_are_sent_as_they_are_produced(client, served):
    served.serving.parts = [part("and"), part(" so"), part("", is_final=True)]
    answer = await client.post(STREAM, json={"text_input": "Once", "id": "mine"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    told = events(answer.content)
    assert [each["text_output"] for each in told] == ["and", " so"]
    assert {each["id"] for each in told} == {"r"}


async def test_an_error_before_the_first_event_is_an_http_error(client, served):
    served.serving.error = QueueFull("full")
    answer = await client.post(STREAM, json={"text_input": "Once"})
    assert (answer.status_code, answer.json()) == (429, {"error": "full"})
    assert (await client.post(STREAM, json={"messages": ["a", "b"]})).status_code == 400
    assert (await client.post(GENERATE, content=b"[]")).json() == {"error": "the body must be a JSON object"}
    assert (await client.post("/v2/models/nobody/generate", json={})).status_code == 404


async def test_a_later_error_is_the_last_event(client, served):
    served.serving.parts, served.serving.error = [part("and")], EngineFailed("it broke")
    answer = await client.post(STREAM, json={"text_input": "Once"})
    assert answer.status_code == 200
    assert [each.get("text_output", each) for each in events(answer.content)] == ["and", {"error": "it broke"}]


async def test_generate_accepts_exactly_one_answer_of_a_decoupled_model(client, served):
    settings = BlockSettings(task="python", is_decoupled=True)
    found = next(each for each in BLOCKS if each.model == "writer")
    decoupled = replace(found, settings=settings)
    served.resolver.set_held_blocks({decoupled.block_id: decoupled})
    served.serving.parts = [part("once"), part("", is_final=True)]
    assert (await client.post(GENERATE, json={"text_input": "a"})).json()["text_output"] == "once"
    served.serving.parts = [part("once"), part("twice")]
    answer = await client.post(GENERATE, json={"text_input": "a"})
    assert (answer.status_code, "generate_stream" in answer.json()["error"]) == (400, True)
    served.serving.parts = [part("", is_final=True)]
    assert (await client.post(GENERATE, json={"text_input": "a"})).status_code == 400


async def test_a_disconnect_ends_the_events(served):
    """Also if no event was sent yet; the request gets no further events."""
    for parts in ([part("and"), asyncio.Event()], [asyncio.Event()]):
        served.serving.parts = parts
        served.serving.is_called.clear()
        sent: list[dict[str, Any]] = []
        left, body = asyncio.Event(), [b'{"text_input": "a"}']

        async def receive(left: asyncio.Event = left, body: list[bytes] = body) -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": STREAM, "raw_path": STREAM.encode(), "query_string": b"",
            "headers": [(b"host", b"penstock")], "http_version": "1.1", "scheme": "http", "server": ("penstock", 80),
            "root_path": "",
        }  # fmt: skip
        task = asyncio.create_task(served.app(scope, receive, send))
        await asyncio.wait_for(served.serving.is_called.wait(), 10)
        left.set()
        await asyncio.wait_for(task, 10)
        assert len([each for each in sent if each["type"] == "http.response.body" and each["body"]]) == len(parts) - 1
    assert served.serving.cancelled == 2


async def test_the_routes_are_documented(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert "text/event-stream" in paths[STREAM.replace("writer", "{model}")]["post"]["responses"]["200"]["content"]
    assert "/v2/models/{model}/versions/{version}/generate" in paths
    assert "generate" in (await client.get("/v2")).json()["extensions"]


async def test_invalid_keys_and_models_are_refused(client, served):
    answer = await client.post(GENERATE, json={"text_input": "a", "parameters": 1})
    assert answer.status_code == 400
    assert isinstance(served.serving.turned[-1], InvalidRequest)
