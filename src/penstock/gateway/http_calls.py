"""The common steps of the REST routes: read requests within the limits, find the model for a task, and serve."""

import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.error_text import describe_problem
from penstock.core.errors import InvalidRequest, PenstockError, RequestTooLarge, UnknownModel
from penstock.core.principals import LimitStatus
from penstock.core.requests import InferRequest, InferResponse
from penstock.endpoints import statuses
from penstock.endpoints.http import http_message
from penstock.endpoints.http.disconnect_watch import DisconnectWatch
from penstock.endpoints.http.http_message import Headers, parse_object, read_body, read_content_type
from penstock.endpoints.http.openapi import admit_again, get_principal, make_json_answer
from penstock.endpoints.large_messages import LARGE_BYTES, LargeMessagePool
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.v1.multipart import FormPart, parse_multipart
from penstock.serving.serve import Serving

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


class RestCall:
    """One request to an inference route: its headers, its body and its id."""

    def __init__(self, request: Request, body: bytes) -> None:
        self.request = request
        self.principal = get_principal(request)
        self.headers: Headers = dict(request.scope["headers"])
        self.body = body
        self.content_type = read_content_type(self.headers)
        self.request_id = http_message.read_request_id(self.headers) or uuid.uuid4().hex
        request.state.request_id = self.request_id  # for `answer_error`
        self.limit_statuses: tuple[LimitStatus, ...] = ()  # the state of its caller's limits

    @property
    def answer_headers(self) -> dict[str, str]:
        # An id from the body may have characters that a header must not have.
        is_plain = http_message.PRINTABLE.fullmatch(self.request_id.encode()) is not None
        found = {"x-request-id": self.request_id} if is_plain else {}
        if self.limit_statuses:
            found |= statuses.make_limit_headers(self.limit_statuses) | statuses.make_openai_limit_headers(
                self.limit_statuses
            )
        return found

    def take_body(self) -> bytes:
        """Return the body, and drop the reference here, so that the memory is freed while the request is served."""
        body, self.body = self.body, b""
        return body


class RestCalls:
    """Functions of the REST routes to read requests, find models and serve requests."""

    def __init__(self, serving: Serving, catalogue: Catalogue, limits: Limits, large: LargeMessagePool) -> None:
        self.limits = limits
        self._serving = serving
        self._catalogue = catalogue
        self._large = large

    async def read_body(self, request: Request) -> bytes:
        """Return the body of a request other than inference; refuse one above limits.max_control_bytes."""
        headers: Headers = dict(request.scope["headers"])
        limit, declared = self.limits.max_control_bytes, headers.get(b"content-length", b"0")
        if declared.isdigit() and len(declared) <= len(str(limit)) and int(declared) <= limit:
            body = await read_body(headers, request.receive, self._large)
            if len(body) <= limit:
                return body
        raise RequestTooLarge(f"the body is over limits.max_control_bytes ({limit}): send less")

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Return the JSON object in the body of a request that does not infer; no body is an empty object."""
        body = await self.read_body(request)
        return parse_object(body, self.limits) if body else {}

    async def read_call(self, request: Request) -> RestCall:
        self._serving.meter.check(get_principal(request), _client_host(request))
        headers: Headers = dict(request.scope["headers"])
        return RestCall(request, await read_body(headers, request.receive, self._large))

    async def decode_json(self, call: RestCall, decode: Callable[[dict[str, Any]], T], or_else: str = "") -> T:
        """Return the result of `decode` for the body's JSON object. `or_else` names other accepted content types."""
        if call.content_type not in ("", "application/json"):
            raise InvalidRequest(f"unsupported content-type '{call.content_type[:80]}': send application/json{or_else}")
        return await self.read_json(call, decode)

    async def read_json(self, call: RestCall, decode: Callable[[dict[str, Any]], T]) -> T:
        """Like `json`, but ignore the content type: curl's default is a form."""
        return await self.run_off_loop(len(call.body), lambda: decode(parse_object(call.take_body(), self.limits)))

    async def read_form(self, call: RestCall) -> list[FormPart]:
        kind = call.headers[b"content-type"]
        return await self.run_off_loop(len(call.body), lambda: parse_multipart(kind, call.take_body()))

    async def run_off_loop(self, size_bytes: int, decode: Callable[[], T]) -> T:
        """Run `decode` on a message of this size, in a thread if the message is large."""
        return decode() if size_bytes <= LARGE_BYTES else await self._large.decode(size_bytes, decode)

    async def create_answer(
        self, call: RestCall, response: InferResponse, encode_answer: Callable[[], object]
    ) -> Response:
        """Return the result of `encode_answer` as a JSON answer, encoded in a thread if the response is large."""
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        if size_bytes <= LARGE_BYTES:
            return make_json_answer(encode_answer(), headers=call.answer_headers)
        return await self._large.encode(
            size_bytes, lambda: make_json_answer(encode_answer(), headers=call.answer_headers)
        )

    async def encode(self, size_bytes: int, encode_answer: Callable[[], T]) -> T:
        """Run `encode_answer`, which encodes a large answer, in a thread; return its result."""
        return await self._large.encode(size_bytes, encode_answer)

    def check_texts(self, key: str, texts: list[Any]) -> None:
        """Raise RequestTooLarge if there are more texts than rows allowed, before they are validated."""
        if len(texts) > self.limits.max_rows:
            raise RequestTooLarge(
                f"'{key}' has {len(texts)} texts, over limits.max_rows ({self.limits.max_rows}): split the request"
            )

    @contextmanager
    def count_rejections(self, request: Request, read_request: InferRequest | None = None) -> Iterator[None]:
        """Count errors in this context as rejected requests. `read_request`: the request, if it was already read."""
        try:
            yield
        except PenstockError as error:
            if read_request is None:
                request_id = getattr(request.state, "request_id", "")
                read_request = InferRequest("", [], request_id=request_id, principal=get_principal(request))
            self._serving.count_rejected("rest", error, read_request)
            raise

    async def serve(self, call: RestCall, request: InferRequest) -> InferResponse:
        self.complete_request(call, request)
        with DisconnectWatch(call.request.receive):
            response = await self._serving.serve(request)
        call.limit_statuses = request.limit_statuses
        return response

    async def stream(self, call: RestCall, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yield the answers as they come. The caller must watch for a disconnect of the client."""
        self.complete_request(call, request)
        async with aclosing(self._serving.stream(request)) as responses:
            async for response in responses:
                call.limit_statuses = request.limit_statuses
                admit_again(call.request)  # the key may expire during a long stream
                yield response

    def watch_disconnect(self, call: RestCall) -> DisconnectWatch:
        return DisconnectWatch(call.request.receive)

    def complete_request(self, call: RestCall, request: InferRequest) -> None:
        """Add the call's caller, id, deadline and size to the request."""
        request.request_id = call.request_id = request.request_id or call.request_id
        request.protocol = "rest"
        request.principal = call.principal
        request.client = _client_host(call.request)
        request.timeout_s = http_message.read_timeout_s(call.headers)
        request.traceparent = http_message.read_traceparent(call.headers)
        request.size_bytes = sum(len(tensor.data) for tensor in request.inputs)

    async def find_task_block(self, call: RestCall, model: str, *tasks: str) -> BlockDescription:
        """Return the block of a model that supports one of the tasks.

        Without a name, use the only model of the first task that has any. Raise UnknownModel or InvalidRequest.
        """
        if not model:
            names = next((found for task in tasks if (found := self._find_models(call, task))), [])
            if len(names) != 1:
                raise UnknownModel(f"'model' is required; ready models for this task: {', '.join(names) or 'none'}")
            model = names[0]
        block = await self._catalogue.wait_for_block(model, "", call.principal)
        if block.settings.task not in tasks:
            able = ", ".join(name for task in tasks for name in self._find_models(call, task)) or "none"
            wanted = " or ".join(f"'{task}'" for task in tasks)
            raise InvalidRequest(
                f"model '{model}' has the task '{block.settings.task}', not {wanted}; ready models for it: {able}"
            )
        return block

    def _find_models(self, call: RestCall, task: str) -> list[str]:
        blocks = self._catalogue.resolver.list_blocks(call.principal)
        return sorted({block.model for block in blocks if block.settings.task == task})


def _client_host(request: Request) -> str:
    return request.client.host if request.client else ""


def validate(model: type[Body], message: dict[str, Any]) -> Body:
    try:
        return model.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"'{where[:80]}': {describe_problem(first)}", parameter=where[:80]) from error
