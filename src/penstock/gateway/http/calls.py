"""Calls to routes: read within the limits, given a model that does the task, served while their client stays."""

import uuid
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, UnknownModel
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http import message as http_message
from penstock.gateway.http.attendance import serve_attended
from penstock.gateway.http.message import Headers, content_type, parse_object, read_body
from penstock.serving.serve import Serving

Body = TypeVar("Body", bound=BaseModel)


class RestCall:
    """One request to a route that infers: its headers, its body and its id."""

    def __init__(self, request: Request, body: bytes) -> None:
        self.request = request
        self.headers: Headers = dict(request.scope["headers"])
        self.body = body
        self.content_type = content_type(self.headers)
        self.request_id = http_message.request_id(self.headers) or uuid.uuid4().hex
        request.state.request_id = self.request_id  # for errors, which are answered elsewhere

    @property
    def answer_headers(self) -> dict[str, str]:
        # An id from the body may hold what no header may.
        is_plain = http_message.PRINTABLE.fullmatch(self.request_id.encode()) is not None
        return {"x-request-id": self.request_id} if is_plain else {}

    def json(self, or_else: str = "") -> dict[str, Any]:
        """The body's object; `or_else` names what the route takes beside JSON."""
        if self.content_type not in ("", "application/json"):
            raise InvalidRequest(f"content-type '{self.content_type[:80]}': send application/json{or_else}")
        return parse_object(self.body)


class RestCalls:
    """Reads calls within the limits, finds their models, and serves them while their clients stay."""

    def __init__(self, serving: Serving, catalogue: Catalogue, limits: Limits) -> None:
        self._serving = serving
        self._catalogue = catalogue
        self._limits = limits

    async def body(self, request: Request) -> bytes:
        return await read_body(dict(request.scope["headers"]), request.receive, self._limits.max_message_bytes)

    async def read(self, request: Request) -> RestCall:
        return RestCall(request, await self.body(request))

    async def serve(self, call: RestCall, request: InferRequest) -> InferResponse:
        request.request_id = call.request_id = request.request_id or call.request_id
        request.protocol = "rest"
        request.timeout_s = http_message.timeout_s(call.headers)
        request.traceparent = http_message.traceparent(call.headers)
        request.size_bytes = sum(len(tensor.data) for tensor in request.inputs)
        return await serve_attended(self._serving, request, call.request.receive)

    async def task_block(self, model: str, *tasks: str) -> BlockDescription:
        """The named model if it does one of the tasks; without a name, the only one, the first task coming first."""
        if not model:
            names = next((found for task in tasks if (found := self._models(task))), [])
            if len(names) != 1:
                raise UnknownModel(f"'model' must name one of: {', '.join(names) or 'none is ready'}")
            model = names[0]
        block = await self._catalogue.block(model, "")
        if block.settings.task not in tasks:
            able = ", ".join(name for task in tasks for name in self._models(task)) or "none is ready"
            wanted = " or ".join(f"'{task}'" for task in tasks)
            raise InvalidRequest(f"model '{model}' does '{block.settings.task}', not {wanted}; such models: {able}")
        return block

    def _models(self, task: str) -> list[str]:
        return sorted({block.model for block in self._catalogue.resolver.blocks() if block.settings.task == task})


def validate(model: type[Body], message: dict[str, Any]) -> Body:
    try:
        return model.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"'{where[:80]}': {first['msg']}") from error
