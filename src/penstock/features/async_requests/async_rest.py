"""Asynchronous requests over REST: `Prefer: respond-async` on any inference route, and the routes of their results."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

from penstock.core.config import Limits
from penstock.core.errors import GatewayLost, PenstockError, RequestTooLarge
from penstock.core.principals import INFERENCE_SCOPES
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.endpoints.http.http_message import Receive, Scope, Send, read_chunks
from penstock.endpoints.http.openapi import Route, get_principal, make_json_answer
from penstock.endpoints.http.refusals import refuse_call
from penstock.features.async_requests.async_records import AsyncRecord, AsyncState, StoredAnswer
from penstock.features.async_requests.async_requests import AsyncRequests

PREFER, RESPOND_ASYNC = b"prefer", b"respond-async"
LEFT_OUT = (PREFER, b"accept-encoding")  # not passed on: clients with other encodings may read the stored answer
ASYNC = "penstock.async"  # marks the scope of a request that already runs asynchronously
RETRY_S = 1


class AsyncRequestState(BaseModel):
    id: str
    state: AsyncState
    path: str
    created_at: float
    finished_at: float | None
    expires_at: float
    status: int | None
    location: str
    result: str | None


def build_accepted_response(record: AsyncRecord) -> Response:
    headers = {
        "location": str(record.document()["location"]),
        "retry-after": str(RETRY_S),
        "preference-applied": RESPOND_ASYNC.decode(),
    }
    return make_json_answer(record.document(), 202, headers)


class AsyncRest:
    """The routes for state, result and cancellation."""

    def __init__(self, requests: AsyncRequests) -> None:
        self._requests = requests

    @Route(
        "GET",
        "/v1/requests/{id}",
        "State of an asynchronous request",
        "Only the key that sent the request finds it.",
        needs=INFERENCE_SCOPES,
        answer=AsyncRequestState,
    )
    async def state(self, request: Request) -> Response:
        return make_json_answer((await self._find_record(request)).document())

    @Route(
        "GET",
        "/v1/requests/{id}/result",
        "Answer to an asynchronous request",
        "The status, type and body of the answer. While the request runs: 202 and its state.",
        needs=INFERENCE_SCOPES,
        answer=AsyncRequestState,
    )
    async def result(self, request: Request) -> Response:
        record = await self._find_record(request)
        if record.state is AsyncState.RUNNING:
            return build_accepted_response(record)
        if record.state is AsyncState.LOST:
            raise GatewayLost(
                f"the gateway that ran the asynchronous request '{record.request_id}' died, and the request may have "
                "run: send it again"
            )
        answer = await self._requests.get_answer(record)
        return Response(answer.body, answer.status, {"x-request-id": record.request_id}, answer.content_type)

    @Route(
        "DELETE",
        "/v1/requests/{id}",
        "Cancel an asynchronous request, or delete its result",
        needs=INFERENCE_SCOPES,
        answer=AsyncRequestState,
    )
    async def cancel(self, request: Request) -> Response:
        record = await self._find_record(request)
        await self._requests.cancel(record)
        return make_json_answer(record.document(), 202 if record.state is AsyncState.RUNNING else 200)

    async def _find_record(self, request: Request) -> AsyncRecord:
        return await self._requests.find(request.path_params["id"], get_principal(request))


class AsyncResponder:
    """Accepts requests with `Prefer: respond-async` at once, and runs the requests in the background."""

    def __init__(self, requests: AsyncRequests, guard: HttpGuard, limits: Limits, routes: Sequence[BaseRoute]) -> None:
        """Create the responder. `routes` are the inference routes."""
        self._requests = requests
        self._guard = guard
        self._limits = limits
        self._routes = routes

    def wants(self, scope: Scope) -> bool:
        """Return whether this is an inference request that prefers an asynchronous answer (RFC 7240)."""
        preferred = [value for name, value in scope["headers"] if name == PREFER]
        if not any(_parse_token(each) == RESPOND_ASYNC for value in preferred for each in value.split(b",")):
            return False
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)

    async def answer(self, application: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            principal = self._guard.admit_scope(scope, INFERENCE_SCOPES)
            body = await read_chunks(receive, self._limits.max_message_bytes)
            record = await self._requests.start(principal, scope["path"], lambda: self._run(application, scope, body))
        except PenstockError as error:
            await refuse_call(error, scope, receive, send)
            return
        await build_accepted_response(record)(scope, receive, send)

    async def _run(self, application: ASGIApp, scope: Scope, body: bytes) -> StoredAnswer:
        headers = [(name, value) for name, value in scope["headers"] if name not in LEFT_OUT]
        exchange = _Exchange(body, self._requests.settings.max_result_bytes)
        state = dict(scope.get("state") or {})
        await application({**scope, "headers": headers, "state": state, ASYNC: True}, exchange.receive, exchange.send)
        return exchange.answer()


class _Exchange:
    """Passes a request to an application without a connection, and collects the answer."""

    def __init__(self, body: bytes, max_bytes: int) -> None:
        self._body: bytes | None = body
        self._max_bytes = max_bytes
        self._start: dict[str, Any] = {}
        self._parts: list[bytes] = []
        self._size = 0

    async def receive(self) -> dict[str, Any]:
        """Return the body; then wait forever, because a disconnect cannot happen without a connection."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            part: bytes = message.get("body", b"")
            self._size += len(part)
            if self._size > self._max_bytes:
                raise RequestTooLarge(
                    f"an asynchronous answer may have at most {self._max_bytes} bytes: send the request "
                    "without 'Prefer: respond-async'"
                )
            self._parts.append(bytes(part))

    def answer(self) -> StoredAnswer:
        kind = dict(self._start.get("headers") or ()).get(b"content-type", b"application/octet-stream")
        return StoredAnswer(self._start["status"], kind.decode("latin-1"), b"".join(self._parts))


def _parse_token(preference: bytes) -> bytes:
    return preference.split(b";", 1)[0].strip().lower()
