"""Triton's generate extension over HTTP: whole answers, and events as they come."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.core.errors import EngineFailed, InvalidRequest, QueueFull
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import from_array
from tests.unit.gateway.conftest import BLOCKS

GENERATE, STREAM = "/v2/models/writer/generate", "/v2/models/writer/generate_stream"


def part(text: str, is_final: bool = False) -> InferResponse:
    outputs = [from_array("text_output", np.array([text.encode()], object))] if text else []
    return InferResponse("writer", "1", "r", outputs, Timing(), is_final=is_final)


def events(body: bytes) -> list[Any]:
    *found, rest = body.split(b"\n\n")
    assert rest == b""
    return [json.loads(each.removeprefix(b"data: ")) for each in found]


async def test_a_whole_answer(client, served):
    served.serving.answer = lambda request: part("and so on", is_final=True)
    body = b'{"text_input": "Once", "parameters": {"max_tokens": 4}, "temperature": 0}'
    form = {"content-type": "application/x-www-form-urlencoded"}  # as curl says it
    answer = await client.post(GENERATE, content=body, headers=form)
    assert answer.json() == {"model_name": "writer", "model_version": "1", "text_output": "and so on"}
    asked: InferRequest = served.serving.last
    assert (asked.model, asked.version, asked.protocol) == ("writer", "", "rest")
    assert asked.parameters == {"max_tokens": 4, "temperature": 0}
    assert "x-request-id" in answer.headers


async def test_any_model_may_be_asked_so(client, served):
    answer = await client.post("/v2/models/echo/versions/2/generate", json={"x": [1, 2]})
    assert answer.json() == {"model_name": "echo", "model_version": "2", "x": [1.0, 2.0]}
    served.serving.parts = [part("once", is_final=True)]
    answer = await client.post("/v2/models/embedder/generate_stream", json={"text": "a"})
    assert [each["text_output"] for each in events(answer.content)] == ["once"]


async def test_events_come_as_they_are_made(client, served):
    served.serving.parts = [part("and"), part(" so"), part("", is_final=True)]
    answer = await client.post(STREAM, json={"text_input": "Once", "id": "mine"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    told = events(answer.content)
    assert [each["text_output"] for each in told] == ["and", " so"]
    assert {each["id"] for each in told} == {"r"}


async def test_what_fails_before_the_first_event_is_a_status(client, served):
    served.serving.error = QueueFull("full")
    answer = await client.post(STREAM, json={"text_input": "Once"})
    assert (answer.status_code, answer.json()) == (429, {"error": "full"})
    assert (await client.post(STREAM, json={"messages": ["a", "b"]})).status_code == 400
    assert (await client.post(GENERATE, content=b"[]")).json() == {"error": "the body must be a JSON object"}
    assert (await client.post("/v2/models/nobody/generate", json={})).status_code == 404


async def test_what_fails_later_is_the_last_event(client, served):
    served.serving.parts, served.serving.error = [part("and")], EngineFailed("it broke")
    answer = await client.post(STREAM, json={"text_input": "Once"})
    assert answer.status_code == 200
    assert [each.get("text_output", each) for each in events(answer.content)] == ["and", {"error": "it broke"}]


async def test_a_decoupled_model_may_answer_once_and_no_more(client, served):
    settings = BlockSettings(task="python", is_decoupled=True)
    found = next(each for each in BLOCKS if each.model == "writer")
    decoupled = replace(found, settings=settings)
    served.resolver.workers_changed({decoupled.block_id: decoupled})
    served.serving.parts = [part("once"), part("", is_final=True)]
    assert (await client.post(GENERATE, json={"text_input": "a"})).json()["text_output"] == "once"
    served.serving.parts = [part("once"), part("twice")]
    answer = await client.post(GENERATE, json={"text_input": "a"})
    assert (answer.status_code, "generate_stream" in answer.json()["error"]) == (400, True)
    served.serving.parts = [part("", is_final=True)]
    assert (await client.post(GENERATE, json={"text_input": "a"})).status_code == 400


async def test_who_leaves_ends_the_events(served):
    """And hears nothing more of them, also where none has come yet."""
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


async def test_the_document_has_them(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert "text/event-stream" in paths[STREAM.replace("writer", "{model}")]["post"]["responses"]["200"]["content"]
    assert "/v2/models/{model}/versions/{version}/generate" in paths
    assert "generate" in (await client.get("/v2")).json()["extensions"]


async def test_keys_and_models_that_cannot_be(client, served):
    answer = await client.post(GENERATE, json={"text_input": "a", "parameters": 1})
    assert answer.status_code == 400
    assert isinstance(served.serving.turned[-1], InvalidRequest)
