"""Asynchronous requests over REST: the size of the stored answer."""

from collections.abc import MutableMapping
from typing import Any

import orjson
from starlette.routing import Route

from penstock.core.config import Config, Limits
from penstock.core.principals import ANYBODY
from penstock.endpoints.guard import create_open_guard
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.endpoints.http.http_message import Receive, Scope, Send
from penstock.features.async_requests.async_records import AsyncState
from penstock.features.async_requests.async_requests import AsyncRequests
from penstock.features.async_requests.async_rest import AsyncResponder
from tests.unit.features.async_requests.test_async_requests import SETTINGS, ended, requests

__all__ = ["requests"]  # a fixture


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with two copies of the body."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for more in (True, False):
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def asked(requests: AsyncRequests, body: bytes) -> tuple[AsyncState, int, bytes]:
    responder = AsyncResponder(
        requests, HttpGuard(Config(), create_open_guard()), Limits(), [Route("/echo", echo, methods=["POST"])]
    )
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/echo",
        "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"localhost"), (b"prefer", b"respond-async")],
    }
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    assert responder.wants(scope)
    await responder.answer(echo, scope, receive, send)
    assert sent[0]["status"] == 202
    accepted = await requests.find(orjson.loads(sent[1]["body"])["id"], ANYBODY)
    record = await ended(requests, accepted, ANYBODY)
    answer = await requests.get_answer(record)
    return record.state, answer.status, answer.body


async def test_an_answer_above_the_limit_is_an_error(requests: AsyncRequests) -> None:
    size = SETTINGS.max_result_bytes // 2
    assert await asked(requests, bytes(size)) == (AsyncState.SUCCEEDED, 200, bytes(2 * size))
    state, status, body = await asked(requests, bytes(size + 1))
    assert (state, status, b"without 'Prefer: respond-async'" in body) == (AsyncState.FAILED, 429, True)
