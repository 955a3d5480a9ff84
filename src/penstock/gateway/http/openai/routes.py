"""The routes of OpenAI's API to models that generate."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.errors import PenstockError
from penstock.core.principals import INFERRING
from penstock.core.settings import GENERATE
from penstock.gateway.http.calls import RestCall, RestCalls
from penstock.gateway.http.openai import schemas
from penstock.gateway.http.openai.answers import ChatChoices, CompletionChoices, OpenAiAnswer
from penstock.gateway.http.openai.requests import GenerationCall, check_inputs, read_chat, read_completion
from penstock.gateway.http.openapi import REF, Route
from penstock.gateway.http.refusals import openai_error
from penstock.gateway.streams.events import EVENT_STREAM, EventStream, json_event

STREAM = """With `stream`, server-sent events: each is a `{event}` in JSON, and `[DONE]` is the last. An answer that
fails on its way ends with an event that has `error`, and without `[DONE]`. A client that leaves cancels its request."""


def _events(model: str) -> dict[str, Any]:
    return {EVENT_STREAM: {"schema": {"$ref": REF.format(model=model)}}}


class GenerationRest:
    def __init__(self, calls: RestCalls) -> None:
        self._calls = calls

    @Route(
        "POST",
        "/v1/chat/completions",
        "The next message of a chat, as OpenAI's API",
        STREAM.format(event="ChatChunk"),
        needs=INFERRING,
        body=schemas.ChatBody,
        answer=schemas.ChatAnswer,
        binary_answer=_events("ChatChunk"),
    )
    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat, ChatChoices)

    @Route(
        "POST",
        "/v1/completions",
        "How a text goes on, as OpenAI's API",
        STREAM.format(event="CompletionsAnswer"),
        needs=INFERRING,
        body=schemas.CompletionsBody,
        answer=schemas.CompletionsAnswer,
        binary_answer=_events("CompletionsAnswer"),
    )
    async def complete(self, request: Request) -> Response:
        return await self._generate(request, self._read_completion, CompletionChoices)

    def _read_completion(self, message: dict[str, Any]) -> GenerationCall:
        prompt = message.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):  # those are one prompt's tokens
            self._calls.check_texts("prompt", prompt)
        return read_completion(message)

    async def _generate(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], GenerationCall],
        choices: Callable[[GenerationCall], ChatChoices | CompletionChoices],
    ) -> Response:
        with self._calls.turning_away():
            call = await self._calls.read(request)
            asked = await self._calls.json(call, read)
            block = await self._calls.task_block(call, asked.request.model, GENERATE)
            check_inputs(block, asked.request)
        answer = OpenAiAnswer(asked, choices(asked), block, call.request_id)
        if not asked.is_stream:
            response = await self._calls.serve(call, asked.request)
            return await self._calls.answer(call, response, lambda: answer.whole(response))
        return EventStream(self._events(call, asked, answer), _told, lambda: call.answer_headers)

    async def _events(self, call: RestCall, asked: GenerationCall, answer: OpenAiAnswer) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._calls.stream(call, asked.request)) as responses:
            async for response in responses:
                if events := answer.events(response):
                    yield events


def _told(error: PenstockError) -> bytes:
    return json_event(openai_error(error))
