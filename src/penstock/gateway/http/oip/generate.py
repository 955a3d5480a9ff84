"""Triton's generate extension: any block with one flat JSON object, answered whole or as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import Request
from fastapi.responses import Response

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.principals import INFERRING
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway import statuses
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http import schemas
from penstock.gateway.http.calls import RestCall, RestCalls
from penstock.gateway.http.oip.generate_codec import decode_generate, encode_generate
from penstock.gateway.http.openapi import REF, Route, path_names
from penstock.gateway.streams.events import EVENT_STREAM, EventStream, json_event

EVENTS = {EVENT_STREAM: {"schema": {"$ref": REF.format(model="GenerateAnswer")}}}


def _paths(end: str) -> tuple[str, str]:
    return f"/v2/models/{{model}}/{end}", f"/v2/models/{{model}}/versions/{{version}}/{end}"


class GenerateRest:
    def __init__(self, calls: RestCalls, catalogue: Catalogue) -> None:
        self._calls = calls
        self._catalogue = catalogue

    @Route(
        "POST",
        _paths("generate"),
        "Generate, and answer when all is done",
        schemas.GENERATE_DESCRIPTION,
        needs=INFERRING,
        body=schemas.GenerateBody,
        answer=schemas.GenerateAnswer,
    )
    async def generate(self, request: Request) -> Response:
        call, decoded, is_decoupled = await self._read(request)
        has_id = bool(decoded.request_id)
        response = await (self._only(call, decoded) if is_decoupled else self._calls.serve(call, decoded))
        return await self._calls.answer(call, response, lambda: encode_generate(response, has_id, self._calls.limits))

    @Route(
        "POST",
        _paths("generate_stream"),
        "Generate, and answer as it comes",
        "As `generate`; each event is what has come since the last. What fails after the first is told in an event.",
        needs=INFERRING,
        body=schemas.GenerateBody,
        binary_answer=EVENTS,
    )
    async def generate_stream(self, request: Request) -> Response:
        call, decoded, _ = await self._read(request)
        return EventStream(self._events(call, decoded), _told, lambda: call.answer_headers)

    async def _read(self, request: Request) -> tuple[RestCall, InferRequest, bool]:
        """And whether its model may only be asked for a stream."""
        model, version = path_names(request)
        with self._calls.turning_away():
            call = await self._calls.read(request)
            block = await self._catalogue.block(model, version, call.principal)
            decode = partial(decode_generate, block=block, limits=self._calls.limits)
            decoded = await self._calls.read_json(call, decode)
        decoded.model, decoded.version = model, version
        return call, decoded, block.settings.is_decoupled

    async def _only(self, call: RestCall, request: InferRequest) -> InferResponse:
        """The answer of a model that may give several, where it gives one."""
        found: InferResponse | None = None
        with self._calls.attended(call):
            async with aclosing(self._calls.stream(call, request)) as responses:
                async for response in responses:
                    if response.outputs and found is not None:
                        raise InvalidRequest(f"model '{request.model}' gives several answers: ask generate_stream")
                    found = response if response.outputs else found
        if found is None:
            raise InvalidRequest(f"model '{request.model}' gave no answer: ask generate_stream, which needs none")
        return found

    async def _events(self, call: RestCall, request: InferRequest) -> AsyncGenerator[bytes, None]:
        has_id = bool(request.request_id)
        async with aclosing(self._calls.stream(call, request)) as responses:
            async for response in responses:
                if response.outputs:
                    yield json_event(encode_generate(response, has_id, self._calls.limits))


def _told(error: PenstockError) -> bytes:
    return json_event({"error": statuses.told(error)})
