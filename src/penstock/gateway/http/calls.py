"""Calls to routes: read within the limits, given a model that does the task, served while their client stays."""

import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, PenstockError, RequestTooLarge, UnknownModel
from penstock.core.principals import LimitStanding
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway import statuses
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http import message as http_message
from penstock.gateway.http.attendance import Attendance, serve_attended
from penstock.gateway.http.message import Headers, content_type, parse_object, read_body
from penstock.gateway.http.openapi import admit_again, json_answer, principal_of
from penstock.gateway.http.v1.multipart import FormPart, parse_multipart
from penstock.gateway.large import LARGE_BYTES, LargeMessages
from penstock.serving.serve import Serving

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


class RestCall:
    """One request to a route that infers: its headers, its body and its id."""

    def __init__(self, request: Request, body: bytes) -> None:
        self.request = request
        self.principal = principal_of(request)
        self.headers: Headers = dict(request.scope["headers"])
        self.body = body
        self.content_type = content_type(self.headers)
        self.request_id = http_message.request_id(self.headers) or uuid.uuid4().hex
        request.state.request_id = self.request_id  # for errors, which are answered elsewhere
        self.standings: tuple[LimitStanding, ...] = ()  # how its caller stands with its limits

    @property
    def answer_headers(self) -> dict[str, str]:
        # An id from the body may hold what no header may.
        is_plain = http_message.PRINTABLE.fullmatch(self.request_id.encode()) is not None
        found = {"x-request-id": self.request_id} if is_plain else {}
        if self.standings:
            found |= statuses.limit_headers(self.standings) | statuses.openai_limit_headers(self.standings)
        return found

    def take_body(self) -> bytes:
        """Once: nobody else holds it while the request is served."""
        body, self.body = self.body, b""
        return body


class RestCalls:
    """Reads calls within the limits, finds their models, and serves them while their clients stay."""

    def __init__(self, serving: Serving, catalogue: Catalogue, limits: Limits, large: LargeMessages) -> None:
        self.limits = limits
        self._serving = serving
        self._catalogue = catalogue
        self._large = large

    async def body(self, request: Request) -> bytes:
        """Of a call that infers nothing, and so has little to say."""
        headers: Headers = dict(request.scope["headers"])
        limit, declared = self.limits.max_control_bytes, headers.get(b"content-length", b"0")
        if declared.isdigit() and len(declared) <= len(str(limit)) and int(declared) <= limit:
            body = await read_body(headers, request.receive, self._large)
            if len(body) <= limit:
                return body
        raise RequestTooLarge(f"the body is over limits.max_control_bytes ({limit}): send less")

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The object in the body of a call that infers nothing; no body is an empty one."""
        body = await self.body(request)
        return parse_object(body, self.limits) if body else {}

    async def read(self, request: Request) -> RestCall:
        self._serving.meter.check(principal_of(request), _client(request))
        headers: Headers = dict(request.scope["headers"])
        return RestCall(request, await read_body(headers, request.receive, self._large))

    async def json(self, call: RestCall, work: Callable[[dict[str, Any]], T], or_else: str = "") -> T:
        """What `work` makes of the body's object; `or_else` names what the route takes beside JSON."""
        if call.content_type not in ("", "application/json"):
            raise InvalidRequest(f"content-type '{call.content_type[:80]}': send application/json{or_else}")
        return await self.read_json(call, work)

    async def read_json(self, call: RestCall, work: Callable[[dict[str, Any]], T]) -> T:
        """The same, whatever the caller says that the body is: curl says that it is a form."""
        return await self.off_loop(len(call.body), lambda: work(parse_object(call.take_body(), self.limits)))

    async def form(self, call: RestCall) -> list[FormPart]:
        kind = call.headers[b"content-type"]
        return await self.off_loop(len(call.body), lambda: parse_multipart(kind, call.take_body()))

    async def off_loop(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Decodes a message of that size: at once where it is small."""
        return work() if size_bytes <= LARGE_BYTES else await self._large.decode(size_bytes, work)

    async def answer(self, call: RestCall, response: InferResponse, make: Callable[[], object]) -> Response:
        """What `make` makes of the response, as JSON."""
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        if size_bytes <= LARGE_BYTES:
            return json_answer(make(), headers=call.answer_headers)
        return await self._large.encode(size_bytes, lambda: json_answer(make(), headers=call.answer_headers))

    def check_texts(self, key: str, texts: list[Any]) -> None:
        """Each is a row: what no model would take is not looked at."""
        if len(texts) > self.limits.max_rows:
            raise RequestTooLarge(
                f"'{key}' has {len(texts)} texts, over limits.max_rows ({self.limits.max_rows}): split the request"
            )

    @contextmanager
    def turning_away(self) -> Iterator[None]:
        """Around what comes before serving: its errors are counted like those of requests that were served."""
        try:
            yield
        except PenstockError as error:
            self._serving.turned_away("rest", error)
            raise

    async def serve(self, call: RestCall, request: InferRequest) -> InferResponse:
        self._complete(call, request)
        response = await serve_attended(self._serving, request, call.request.receive)
        call.standings = request.standings
        return response

    async def stream(self, call: RestCall, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The answers as they come; whoever takes them sees to it that the client is there."""
        self._complete(call, request)
        async with aclosing(self._serving.stream(request)) as responses:
            async for response in responses:
                call.standings = request.standings
                admit_again(call.request)  # it may go on for long
                yield response

    def attended(self, call: RestCall) -> Attendance:
        return Attendance(call.request.receive)

    def _complete(self, call: RestCall, request: InferRequest) -> None:
        request.request_id = call.request_id = request.request_id or call.request_id
        request.protocol = "rest"
        request.principal = call.principal
        request.client = _client(call.request)
        request.timeout_s = http_message.timeout_s(call.headers)
        request.traceparent = http_message.traceparent(call.headers)
        request.size_bytes = sum(len(tensor.data) for tensor in request.inputs)

    async def task_block(self, call: RestCall, model: str, *tasks: str) -> BlockDescription:
        """The named model if it does one of the tasks; without a name, the only one, the first task coming first."""
        if not model:
            names = next((found for task in tasks if (found := self._models(call, task))), [])
            if len(names) != 1:
                raise UnknownModel(f"'model' must name one of: {', '.join(names) or 'none is ready'}")
            model = names[0]
        block = await self._catalogue.block(model, "", call.principal)
        if block.settings.task not in tasks:
            able = ", ".join(name for task in tasks for name in self._models(call, task)) or "none is ready"
            wanted = " or ".join(f"'{task}'" for task in tasks)
            raise InvalidRequest(f"model '{model}' does '{block.settings.task}', not {wanted}; such models: {able}")
        return block

    def _models(self, call: RestCall, task: str) -> list[str]:
        blocks = self._catalogue.resolver.blocks(call.principal)
        return sorted({block.model for block in blocks if block.settings.task == task})


def _client(request: Request) -> str:
    return request.client.host if request.client else ""


def validate(model: type[Body], message: dict[str, Any]) -> Body:
    try:
        return model.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"'{where[:80]}': {first['msg']}", parameter=where[:80]) from error
