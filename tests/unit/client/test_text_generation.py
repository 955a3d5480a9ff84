"""`chat` and `generate` of both clients, against a small server that generates text as the test says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from penstock.client import AsyncClient, Client, Generated, Retries, TextChoice, TextDelta, TextUsage
from penstock.client.text_generation import join_deltas, make_chat_request, make_prompt_request, read_deltas
from penstock.core.errors import DeadlineExceeded, InternalError, InvalidRequest, WorkerLost
from penstock.pb.inference import grpc_service_pb2 as pb
from tests.writer import Writer, writing


@pytest.fixture
async def writer() -> AsyncIterator[Writer]:
    async with writing() as found:
        yield found


def text_of(message: pb.ModelInferRequest, name: str) -> str:
    place = [each.name for each in message.inputs].index(name)
    return message.raw_input_contents[place][4:].decode()


async def test_whole_answers_are_returned(writer: Writer) -> None:
    def ask() -> Generated:
        with Client(writer.address) as client:
            return client.chat("m", "Tell me a story", system="Be brief", max_tokens=3, stop=["\n", "."], n=2)

    found = await asyncio.to_thread(ask)
    assert (found.text, found.finish_reason, len(found.choices)) == ("Once upon a time", "stop", 2)
    assert found.usage == TextUsage(5, 6, None)
    assert found.usage.total_tokens == 11
    (asked,) = writer.requests
    assert json.loads(text_of(asked, "messages")) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Tell me a story"},
    ]
    assert asked.parameters["max_tokens"].int64_param == 3
    assert asked.parameters["stop"].string_param == '["\\n", "."]'
    async with AsyncClient(writer.address) as client:
        assert (await client.generate("m", "Once", temperature=0.5)).text == "Once upon a time"
    assert text_of(writer.requests[-1], "text_input") == "Once"
    assert writer.requests[-1].parameters["temperature"].double_param == 0.5


async def test_deltas_are_yielded_as_they_arrive(writer: Writer) -> None:
    def ask() -> list[TextDelta]:
        with Client(writer.address) as client:
            return list(client.generate("m", "Once", stream=True))

    heard = await asyncio.to_thread(ask)
    assert "".join(map(str, heard)) == "Once upon a time"
    assert [(each.text, each.finish_reason) for each in heard] == [("Once", ""), (" upon", ""), (" a time", "length")]
    assert [each.usage.completion_tokens for each in heard] == [1, 2, 3]
    async with AsyncClient(writer.address) as client:
        async for delta in client.chat("m", [{"role": "user", "content": "hi"}], stream=True):
            heard.append(delta)
    assert "".join(each.text for each in heard) == 2 * "Once upon a time"


async def test_leaving_the_iteration_cancels_the_rest(writer: Writer) -> None:
    def leave_early() -> None:
        with Client(writer.address) as client:
            deltas = client.chat("silent", "hi", stream=True)
            assert next(deltas).text == "Once"
            deltas.close()

    await asyncio.to_thread(leave_early)
    await asyncio.wait_for(writer.ended.wait(), 10)
    writer.ended.clear()
    async with AsyncClient(writer.address) as client:
        async with aclosing(client.chat("silent", "hi", stream=True)) as deltas:
            assert (await anext(deltas)).text == "Once"
        await asyncio.wait_for(writer.ended.wait(), 10)
        writer.ended.clear()
        waiting = asyncio.create_task(client.chat("silent", "hi"))  # a whole answer is cancelled too
        while len(writer.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait_for(writer.ended.wait(), 10)


async def test_only_generations_that_have_not_started_are_retried(writer: Writer) -> None:
    async with AsyncClient(writer.address, retries=Retries(first_s=0.001)) as client:
        assert len([each async for each in client.generate("flaky", "a", stream=True)]) == 3
        assert len(writer.requests) == 2
        writer.requests.clear()
        assert (await client.generate("flaky", "a")).text == "Once upon a time"
        assert len(writer.requests) == 2
        deltas = client.generate("lost", "a", stream=True)
        assert (await anext(deltas)).text == "Once"
        with pytest.raises(WorkerLost):
            await anext(deltas)
        assert len(writer.requests) == 3


async def test_deadlines_end_generations(writer: Writer) -> None:
    async with AsyncClient(writer.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("silent", "a", timeout_s=0.1)
        deltas = client.generate("silent", "a", stream=True, timeout_s=0.3)
        with pytest.raises(DeadlineExceeded):
            assert await anext(deltas) == await anext(deltas)


def test_prompts_can_be_texts_or_tokens() -> None:
    assert make_prompt_request("m", ["a", "b"], {}).inputs["text_input"].tolist() == ["a", "b"]
    ids = make_prompt_request("m", [1, 2], {}).inputs["input_ids"]
    assert (ids.dtype.name, ids.tolist()) == ("int64", [1, 2])
    wrong: list[Any] = [[], ["a", 1], [True]]
    for prompt in wrong:
        with pytest.raises(InvalidRequest):
            make_prompt_request("m", prompt, {})
    with pytest.raises(InvalidRequest, match="chat"):
        make_prompt_request("m", "a", {"system": "b"})


def test_options_are_sent_as_parameters() -> None:
    asked = make_chat_request(
        "m",
        "hi",
        {
            "logprobs": True,
            "response_format": {"type": "json_object"},
            "top_k": None,
            "parameters": {"own": 1},
            "version": "2",
            "priority": 3,
        },
    )
    assert asked.parameters == {"logprobs": True, "response_format": '{"type": "json_object"}', "own": 1}
    assert (asked.version, asked.controls["priority"]) == ("2", 3)
    assert "token_ids" in asked.outputs
    assert not make_chat_request("m", "hi", {"logprobs": False}).outputs
    unknown: Any = {"temperatures": 1}
    with pytest.raises(TypeError, match="temperatures"):
        make_chat_request("m", "hi", unknown)
    with pytest.raises(InvalidRequest, match="no messages"):
        make_chat_request("m", [], {})
    with pytest.raises(InvalidRequest, match="JSON"):
        make_chat_request("m", [{"role": object()}], {})


def test_tokens_belong_to_their_pieces() -> None:
    outputs = {
        "text_output": np.array([b"a", b"bc"], object),
        "index": np.array([1, 0], np.int32),
        "finish_reason": np.array([b"", b"stop"], object),
        "usage": np.array([4, 3, 2], np.int32),
        "token_ids": np.array([7, 8, 9], np.int32),
        "logprobs": np.array([-1, -2, -3], np.float32),
        "counts": np.array([1, 2], np.int32),
    }
    one, other = read_deltas(outputs, "m")
    assert one == TextDelta("a", 1, "", TextUsage(4, 3, 2), [7], [-1.0])
    assert other == TextDelta("bc", 0, "stop", TextUsage(4, 3, 2), [8, 9], [-2.0, -3.0])
    assert join_deltas(iter([one, other])).choices == [
        TextChoice("bc", "stop", [8, 9], [-2.0, -3.0]),
        TextChoice("a", "", [7], [-1.0]),
    ]


def test_invalid_answers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="text_output"):
        list(read_deltas({"y": np.zeros(1)}, "m"))
    with pytest.raises(InternalError, match="index"):
        list(read_deltas({"text_output": np.array([b"a"], object), "index": np.zeros(2, np.int32)}, "m"))
    with pytest.raises(InternalError):
        join_deltas(iter(()))
