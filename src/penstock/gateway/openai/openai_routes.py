"""The routes of OpenAI's API for models that generate text."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.errors import PenstockError
from penstock.core.principals import INFERENCE_SCOPES
from penstock.core.settings import GENERATE
from penstock.endpoints.http.event_stream import EVENT_STREAM, EventStream, encode_json_event
from penstock.endpoints.http.openapi import SCHEMA_REFERENCE, Route
from penstock.endpoints.http.refusals import make_openai_error
from penstock.gateway.http_calls import RestCall, RestCalls
from penstock.gateway.openai import openai_schemas as schemas
from penstock.gateway.openai.chat_answers import ChatChoices, CompletionChoices, OpenAiAnswer
from penstock.gateway.openai.chat_requests import GenerationCall, check_inputs, read_chat, read_completion

STREAM_DESCRIPTION = """With `stream`, the answer is server-sent events: each is a `{event}` in JSON, and the last is
`[DONE]`. If the answer fails after it started, the last event has `error`, and `[DONE]` is missing. A disconnect of the
client cancels the request."""


def _describe_events(model: str) -> dict[str, Any]:
    return {EVENT_STREAM: {"schema": {"$ref": SCHEMA_REFERENCE.format(model=model)}}}


class GenerationRest:
    def __init__(self, calls: RestCalls) -> None:
        self._calls = calls

    @Route(
        "POST",
        "/v1/chat/completions",
        "Generate the next message of a chat, as in OpenAI's API",
        STREAM_DESCRIPTION.format(event="ChatChunk"),
        needs=INFERENCE_SCOPES,
        body=schemas.ChatBody,
        answer=schemas.ChatAnswer,
        binary_answer=_describe_events("ChatChunk"),
    )
    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat, ChatChoices)

    @Route(
        "POST",
        "/v1/completions",
        "Complete a text, as in OpenAI's API",
        STREAM_DESCRIPTION.format(event="CompletionsAnswer"),
        needs=INFERENCE_SCOPES,
        body=schemas.CompletionsBody,
        answer=schemas.CompletionsAnswer,
        binary_answer=_describe_events("CompletionsAnswer"),
    )
    async def complete(self, request: Request) -> Response:
        return await self._generate(request, self._read_completion, CompletionChoices)

    def _read_completion(self, message: dict[str, Any]) -> GenerationCall:
        prompt = message.get("prompt")
        if (
            isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        ):  # integers are the tokens of one prompt
            self._calls.check_texts("prompt", prompt)
        return read_completion(message)

    async def _generate(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], GenerationCall],
        choices: Callable[[GenerationCall], ChatChoices | CompletionChoices],
    ) -> Response:
        with self._calls.count_rejections(request):
            call = await self._calls.read_call(request)
            generation = await self._calls.decode_json(call, read)
            block = await self._calls.find_task_block(call, generation.request.model, GENERATE)
            check_inputs(block, generation.request)
        answer = OpenAiAnswer(generation, choices(generation), block, call.request_id)
        if not generation.is_stream:
            response = await self._calls.serve(call, generation.request)
            return await self._calls.create_answer(call, response, lambda: answer.encode_answer(response))
        return EventStream(
            self._encode_events(call, generation, answer), _encode_error_event, lambda: call.answer_headers
        )

    async def _encode_events(
        self, call: RestCall, generation: GenerationCall, answer: OpenAiAnswer
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._calls.stream(call, generation.request)) as responses:
            async for response in responses:
                if events := answer.encode_events(response):
                    yield events


def _encode_error_event(error: PenstockError) -> bytes:
    return encode_json_event(make_openai_error(error))
