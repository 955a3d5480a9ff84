"""OpenAI's chat completions and completions, whole and as events, with a fake serving."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.blocks import BlockDescription, BlockState, BlockView
from penstock.core.errors import PenstockError, QueueFull, RequestTooLarge, Unauthenticated, WorkerLost
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import Tensor, TensorSpec, from_array, pack_bytes
from penstock.gateway.openai.openai_schemas import ChatBody, CompletionsBody

TEXT, CHAT = TensorSpec("text_input", "BYTES", (-1,)), TensorSpec("messages", "BYTES", (1,))
BODY = {"model": "scribe", "messages": [{"role": "user", "content": "a"}]}
Given = tuple[int, str, str]  # choice, text, reason of its end


def writer(name: str, *inputs: TensorSpec) -> BlockDescription:
    generates = BlockSettings(task="generate")
    return BlockDescription(f"blk-{name}", name, "1", "genai", "", inputs, (), 0, 1, generates, "cpu", "f1" * 20)


BLOCKS = [writer("scribe", TEXT, CHAT), writer("plain", TEXT)]


def answer(given: Sequence[Given], usage: Sequence[int] = (), is_final: bool = True, tokens: Any = ()) -> InferResponse:
    indices, texts, reasons = zip(*given, strict=True)
    outputs = [
        Tensor("text_output", "BYTES", (len(given),), pack_bytes(texts)),
        from_array("index", np.array(indices, np.int32)),
        Tensor("finish_reason", "BYTES", (len(given),), pack_bytes(reasons)),
        from_array("usage", np.array(usage or (5, 2, -1), np.int32)),
    ]
    if tokens:
        outputs += [
            Tensor("token_bytes", "BYTES", (len(tokens),), pack_bytes(tokens)),
            from_array("logprobs", np.full(len(tokens), -0.5, np.float32)),
            from_array("counts", np.array([len(tokens)], np.int32)),
        ]
    return InferResponse("scribe", "1", "", outputs, Timing(), {"tokens": 1}, is_final)


class Streaming:
    """Stream these answers, then raise the error."""

    def __init__(self, *answers: InferResponse, error: PenstockError | Exception | None = None) -> None:
        self.answers = answers
        self.error = error
        self.is_endless = False
        self.has_ended = False
        self.request: InferRequest | None = None

    async def __call__(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self.request = request
        try:
            for each in self.answers:
                await asyncio.sleep(0)
                yield each
            if self.is_endless:
                await asyncio.get_running_loop().create_future()
            if self.error is not None:
                raise self.error
        finally:
            self.has_ended = True


@pytest.fixture
def generating(served: Any) -> Any:
    views = [BlockView(each.block_id, each.model, "1", BlockState.READY, "") for each in BLOCKS]
    served.resolver.set_views([*served.views, *views])
    served.resolver.set_held_blocks({each.block_id: each for each in BLOCKS})
    return served.serving


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def streamed(client: Any, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    found = await client.post(path, json={**BODY, **body, "stream": True})
    assert found.status_code == 200, found.text
    assert found.headers["content-type"].startswith("text/event-stream")
    return events(found.text)


# --- whole answers


async def test_a_chat_is_answered(generating, client):
    generating.answer = lambda request: answer([(0, "Hej", "stop")], (5, 2, 3))
    found = (await client.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "mine"})).json()
    assert found.pop("created") > 1_700_000_000
    assert found == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "model": "scribe",
        "system_fingerprint": "fp_f1f1f1f1f1f1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hej", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert (generating.last.protocol, generating.last.request_id) == ("rest", "mine")
    assert generating.last.size_bytes > 0


async def test_completions_are_answered(generating, client):
    generating.answer = lambda request: answer([(0, "a", "length"), (1, "b", "stop")], (2, 2, -1))
    body = {"model": "plain", "prompt": ["x", "y"]}
    found = (await client.post("/v1/completions", json=body)).json()
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"},
        {"index": 1, "text": "b", "logprobs": None, "finish_reason": "stop"},
    ]
    assert "prompt_tokens_details" not in found["usage"]


async def test_logprobs_are_returned(generating, client):
    generating.answer = lambda request: answer([(0, "Hé", "stop")], tokens=[b"H", b"\xc3", b"\xa9"])
    body = {**BODY, "logprobs": True, "top_logprobs": 1}
    choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    first, second, _ = choice["logprobs"]["content"]
    told = {"token": "H", "logprob": -0.5, "bytes": [72]}
    assert first == {**told, "top_logprobs": [told]}
    assert (second["token"], second["bytes"]) == ("bytes:\\xc3", [0xC3])
    body = {"model": "scribe", "prompt": "x", "logprobs": 1}
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert choice["logprobs"]["text_offset"][:2] == [0, 1]
    assert choice["logprobs"]["top_logprobs"][0] == {"H": -0.5}


async def test_a_tool_call_is_returned(generating, client):
    text = '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call>'
    generating.answer = lambda request: answer([(0, text, "stop")])
    tools = [{"type": "function", "function": {"name": "clock"}}]
    choice = (await client.post("/v1/chat/completions", json={**BODY, "tools": tools})).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"] == {"name": "clock", "arguments": '{"zone":"CET"}'}
    assert call["id"].startswith("call_")
    plain = (await client.post("/v1/chat/completions", json=BODY)).json()["choices"][0]
    assert (plain["message"]["content"], plain["finish_reason"]) == (text, "stop")  # without tools, text is wanted


# --- events


async def test_a_chat_is_streamed(generating, client):
    generating.stream = Streaming(
        answer([(0, "He", "")], (5, 1, 0), is_final=False), answer([(0, "j", "stop")], (5, 2, 0))
    )
    *chunks, done = await streamed(client)
    assert done == "[DONE]"
    assert {(each["object"], each["id"]) for each in chunks} == {("chat.completion.chunk", chunks[0]["id"])}
    assert all("usage" not in each for each in chunks)
    deltas = [(each["choices"][0]["delta"], each["choices"][0]["finish_reason"]) for each in chunks]
    assert deltas == [
        ({"role": "assistant", "content": "", "refusal": None}, None),
        ({"content": "He"}, None),
        ({"content": "j"}, None),
        ({}, "stop"),
    ]
    *chunks, usage, _ = await streamed(client, stream_options={"include_usage": True})
    assert all(each["usage"] is None for each in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_has_several_choices(generating, client):
    generating.stream = Streaming(
        answer([(0, "a", ""), (1, "b", "")], is_final=False), answer([(1, "", "stop"), (0, "c", "length")])
    )
    *chunks, _ = await streamed(client, n=2)
    choices = [each["choices"][0] for each in chunks]
    assert [each["delta"]["content"] for each in choices if each["index"] == 0 and each["delta"]] == ["", "a", "c"]
    assert {each["index"]: each["finish_reason"] for each in choices if each["finish_reason"]} == {
        0: "length",
        1: "stop",
    }
    *chunks, _ = await streamed(client, "/v1/completions", prompt="x", n=2)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in (each["choices"][0] for each in chunks)] == [
        (0, "a", None),
        (1, "b", None),
        (1, "", "stop"),
        (0, "c", "length"),
    ]


async def test_a_tool_call_is_streamed(generating, client):
    text = 'Well.\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    parts = [answer([(0, letter, "")], is_final=False) for letter in text]
    generating.stream = Streaming(*parts, answer([(0, "", "stop")]))
    tools = [{"type": "function", "function": {"name": "clock"}}]
    *chunks, _ = await streamed(client, tools=tools)
    deltas = [each["choices"][0]["delta"] for each in chunks]
    assert "".join(each.get("content") or "" for each in deltas) == "Well."
    ((call,),) = [each["tool_calls"] for each in deltas if "tool_calls" in each]
    assert (call["index"], call["function"]) == (0, {"name": "clock", "arguments": "{}"})
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_an_error_before_the_first_event_is_an_http_error(generating, client):
    generating.stream = Streaming(error=QueueFull("too many wait"))
    found = await client.post("/v1/chat/completions", json={**BODY, "stream": True}, headers={"x-request-id": "r1"})
    assert (found.status_code, found.headers["retry-after"], found.headers["x-request-id"]) == (429, "1", "r1")
    assert found.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("error", "code"), [(WorkerLost("the worker died"), "worker_lost"), (RuntimeError("a bug"), "internal")]
)
async def test_a_later_error_is_the_last_event(generating, client, error, code):
    generating.stream = Streaming(answer([(0, "He", "")], is_final=False), error=error)
    *_, last = await streamed(client)
    assert (last["error"]["code"], last["error"]["type"]) == (code, "server_error")
    assert "a bug" not in last["error"]["message"]


async def test_a_revoked_key_ends_the_stream(served, generating, client):
    parts = [answer([(0, "a", "")], is_final=False)] * 3
    generating.stream = Streaming(*parts, answer([(0, "", "stop")]))
    admit, admitted = served.app.http_guard.admit, iter(range(2))  # the endpoint, and the first answer

    def admit_twice(*given: Any) -> Any:
        if next(admitted, None) is None:
            raise Unauthenticated("this key was revoked")
        return admit(*given)

    served.app.http_guard.admit = admit_twice
    *_, last = await streamed(client)
    assert last["error"]["code"] == "unauthenticated"
    assert generating.stream.has_ended


async def test_a_disconnect_cancels_the_stream(served, generating):
    generating.stream = Streaming(answer([(0, "a", "")], is_final=False))
    generating.stream.is_endless = True
    sent: list[Any] = []
    body = json.dumps({**BODY, "stream": True}).encode()
    said: asyncio.Queue[Any] = asyncio.Queue()
    said.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):
            said.put_nowait({"type": "http.disconnect"})

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"host", b"penstock")],
        "client": ("1.2.3.4", 5),
        "state": {},
    }
    await asyncio.wait_for(served.app(scope, said.get, send), 10)
    assert generating.stream.has_ended
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


# --- refusals


async def test_errors_name_the_wrong_parameter(generating, client):
    for path, body, status, param in (
        ("/v1/chat/completions", {**BODY, "temperature": 9}, 400, "temperature"),
        ("/v1/chat/completions", {**BODY, "model": "plain"}, 400, "model"),
        ("/v1/chat/completions", {**BODY, "model": "nobody"}, 404, None),
        ("/v1/chat/completions", {**BODY, "model": "scribe", "messages": "a"}, 400, "messages"),
        ("/v1/completions", {"model": "scribe", "prompt": "a", "suffix": "b"}, 400, "suffix"),
    ):
        found = await client.post(path, json=body)
        error = found.json()["error"]
        assert (found.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert not generating.requests
    assert len(generating.turned) == 5


async def test_a_context_that_is_too_long_has_openais_code(generating, client):
    generating.error = RequestTooLarge("too long", reason="context_length_exceeded")
    found = await client.post("/v1/chat/completions", json=BODY)
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "context_length_exceeded"


async def test_the_routes_are_documented(generating, client):
    document = (await client.get("/openapi.json")).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatBody")
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["messages"]["items"]["$ref"].endswith("/ChatMessage")
    assert "ChatChunk" in schemas


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*ChatBody.model_fields, *CompletionsBody.model_fields} - {"model"})


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(st.sampled_from(KEYS), ANY, max_size=4), is_chat=st.booleans())
async def test_arbitrary_bodies_cause_no_internal_error(generating, client, body, is_chat):
    generating.answer = lambda request: answer([(0, "a", "stop")])
    generating.stream = Streaming(answer([(0, "a", "stop")], tokens=[b"a"]))
    path, wanted = ("/v1/chat/completions", BODY) if is_chat else ("/v1/completions", {"prompt": "a"})
    found = await client.post(path, json={**wanted, **body, "model": "scribe"})
    assert found.status_code in (200, 400), found.text
