"""The unmodified openai package with a model that generates text: chat completions and completions."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually

CHAT: Any = [{"role": "user", "content": "Name three colours."}]
GREEDY: Any = {"temperature": 0, "max_tokens": 6}


class Wall(BaseModel):
    colour: Literal["red", "green"]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_a_chat_is_answered_whole_and_streamed(client, smollm2):
    assert client.models.retrieve(smollm2).model_extra["task"] == "generate"
    whole = client.chat.completions.create(model=smollm2, messages=CHAT, **GREEDY)
    assert (whole.object, whole.id[:9], whole.choices[0].finish_reason) == ("chat.completion", "chatcmpl-", "length")
    text = whole.choices[0].message.content
    assert text
    assert (whole.usage.completion_tokens, whole.usage.total_tokens - whole.usage.prompt_tokens) == (6, 6)
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(
        model=smollm2, messages=CHAT, stream=True, stream_options=options, **GREEDY
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.total_tokens) == ([], whole.usage.total_tokens)
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    again = client.chat.completions.create(model=smollm2, messages=parts, **GREEDY)
    assert again.choices[0].message.content == text


def test_choices_stops_and_seeds_are_supported(client, smollm2):
    def ask(**options: Any) -> Any:
        given = {"temperature": 1.0, "max_tokens": 8, **options}
        return client.chat.completions.create(model=smollm2, messages=CHAT, **given).choices

    first, second = ask(n=2, seed=7)
    assert (first.index, second.index) == (0, 1)
    assert [choice.message.content for choice in ask(n=2, seed=7)] == [first.message.content, second.message.content]
    greedy = ask(temperature=0)[0].message.content
    word = greedy.split()[1]
    (stopped,) = ask(temperature=0, stop=[word])
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == greedy[: greedy.index(word)]


def test_logprobs_are_returned(client, smollm2):
    options = {"logprobs": True, "top_logprobs": 1, **GREEDY}
    choice = client.chat.completions.create(model=smollm2, messages=CHAT, **options).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(token.logprob <= 0 and token.top_logprobs[0].token == token.token for token in tokens)
    chunks = client.completions.create(model=smollm2, prompt="Water", logprobs=0, stream=True, **GREEDY)
    assert sum(len(chunk.choices[0].logprobs.token_logprobs) for chunk in chunks) == 6


def test_an_answer_follows_a_schema(client, smollm2):
    asked: Any = [{"role": "user", "content": "The wall is red. Answer with JSON."}]
    found = client.chat.completions.parse(
        model=smollm2, messages=asked, response_format=Wall, temperature=0, max_tokens=24
    )
    assert isinstance(found.choices[0].message.parsed, Wall)


def test_completions_accept_texts_and_tokens(client, smollm2):
    texts = client.completions.create(model=smollm2, prompt=["Water boils at", "The sky is"], n=2, **GREEDY)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.id.startswith("cmpl-")
    echoed = client.completions.create(model=smollm2, prompt="Water boils at", echo=True, **GREEDY)
    assert echoed.choices[0].text == "Water boils at" + texts.choices[0].text
    one = client.completions.create(model=smollm2, prompt=[28, 29], **GREEDY)
    both = client.completions.create(model=smollm2, prompt=[[28, 29], [30]], **GREEDY)
    assert (both.choices[0].text, len(both.choices)) == (one.choices[0].text, 2)
    echoed = client.completions.create(model=smollm2, prompt=[[28, 29]], echo=True, **GREEDY)
    assert echoed.choices[0].text.endswith(one.choices[0].text)
    assert len(echoed.choices[0].text) > len(one.choices[0].text)
    assert len(client.completions.create(model=smollm2, prompt="Water", temperature=0).choices[0].text) > 16


def test_headers_are_set(client, smollm2):
    answer = client.chat.completions.with_raw_response.create(
        model=smollm2, messages=CHAT, extra_headers={"x-request-id": "mine"}, extra_body={"top_k": 3}, **GREEDY
    )
    assert (answer.headers["x-request-id"], answer.parse().id) == ("mine", "chatcmpl-mine")
    with client.chat.completions.with_streaming_response.create(
        model=smollm2, messages=CHAT, stream=True, extra_headers={"x-request-id": "yours"}, **GREEDY
    ) as streamed:
        assert streamed.headers["x-request-id"] == "yours"
        *_, last = (line for line in streamed.iter_lines() if line)
        assert last == "data: [DONE]"


def test_a_stream_that_is_closed_is_cancelled(server, client, smollm2):
    stream = client.chat.completions.create(
        model=smollm2, messages=CHAT, stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: server.status()["inflight_requests"] == 0)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("changed", "error", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "unknown_model"),
        ({"model": "add_sub"}, openai.BadRequestError, "invalid_request"),
        ({"temperature": 2.5}, openai.BadRequestError, "invalid_request"),
        ({"messages": [{"role": "robot", "content": "a"}]}, openai.BadRequestError, "invalid_request"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"max_tokens": 100_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "invalid_request"),
        ({"logprobs": True, "top_logprobs": 5}, openai.BadRequestError, "invalid_request"),
        ({"tools": [TOOL]}, openai.BadRequestError, "invalid_request"),  # this model's template supports no tools
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_packages_types(client, smollm2, changed, error, code, stream):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": smollm2, "messages": CHAT, "stream": stream, **changed})
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", code)


def test_an_answer_that_fails_midway_ends_with_an_error(client, smollm2):
    with pytest.raises(openai.APIError, match="deadline") as caught:
        for _ in client.chat.completions.create(
            model=smollm2,
            messages=CHAT,
            stream=True,
            max_tokens=8000,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-timeout-ms": "700"},
        ):
            pass
    assert caught.value.code == "deadline_exceeded"


async def test_the_asynchronous_client_chats(server, smollm2):
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none") as client:

        async def ask(prompt: str) -> str:
            stream = await client.chat.completions.create(
                model=smollm2, messages=[{"role": "user", "content": prompt}], stream=True, max_tokens=8
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*[ask(f"Say {number}.") for number in range(4)])
        assert all(answers)
        schema = {"name": "x", "schema": Wall.model_json_schema()}
        answer = await client.completions.create(
            model=smollm2,
            prompt="A wall:",
            max_tokens=24,
            extra_body={"response_format": {"type": "json_schema", "json_schema": schema}},
        )
        assert Wall.model_validate_json(answer.choices[0].text).colour
