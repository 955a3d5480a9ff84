"""Callers of endpoints, the credentials that they send, and the answers that they get."""

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from penstock.core.principals import Principal, Scope
from tests.chaos.access.endpoints import WEBSOCKET, EndpointToTry

ANSWER_S = 3.0  # an endpoint that does not answer within this time has admitted the caller
Code: Any = grpc.StatusCode
Pairs = list[tuple[str, str]]


class Verdict(StrEnum):
    ADMITTED = "admitted"
    UNKNOWN = "unknown"  # the caller is unknown
    FORBIDDEN = "forbidden"
    ABSENT = "absent"  # the endpoint does not exist


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    scopes: frozenset[Scope] | None = None  # None: unknown to the server
    headers: tuple[tuple[str, str], ...] = ()
    certificate: str = ""

    def get_expected_verdict(self, endpoint: EndpointToTry) -> Verdict:
        if endpoint.is_for_all:
            return Verdict.ADMITTED
        if self.scopes is None:
            return Verdict.UNKNOWN
        is_allowed = bool(endpoint.needs) and Principal("", scopes=self.scopes).may(endpoint.needs)
        return Verdict.ADMITTED if is_allowed else Verdict.FORBIDDEN


def make_key_headers(key: str, header_number: int = 0) -> tuple[tuple[str, str], ...]:
    """Return a header that contains the key; `header_number` chooses one of three forms."""
    basic = b64encode(f"anybody:{key}".encode()).decode()
    ways = (("authorization", f"Bearer {key}"), ("x-api-key", key), ("authorization", f"Basic {basic}"))
    return (ways[header_number % len(ways)],)


# --- gRPC


async def try_method(
    channel: grpc.aio.Channel, endpoint: EndpointToTry, headers: Pairs, message: bytes = b""
) -> tuple[Verdict, str]:
    code, said = await call_method(channel, endpoint, headers, message)
    return judge_code(code), f"{code.name} {said!r}"


async def call_method(
    channel: grpc.aio.Channel, endpoint: EndpointToTry, headers: Pairs, message: bytes = b""
) -> tuple[Any, Any]:
    """Return the status and its message; DEADLINE_EXCEEDED if nothing was received."""
    is_stream = endpoint.method is None or endpoint.method.server_streaming
    make: Any = (
        channel.unary_stream if is_stream else channel.unary_unary
    )  # a single answer of a stream is read in the same way
    call = make(endpoint.name)(message, metadata=headers)
    try:
        if is_stream:
            said = await asyncio.wait_for(call.read(), ANSWER_S)
            return (await call.code(), b"") if said is grpc.aio.EOF else (Code.OK, said)
        return Code.OK, await asyncio.wait_for(call, ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    except TimeoutError:
        return Code.DEADLINE_EXCEEDED, ""
    finally:
        call.cancel()


def judge_code(code: Any) -> Verdict:
    verdicts = {
        Code.UNAUTHENTICATED: Verdict.UNKNOWN,
        Code.PERMISSION_DENIED: Verdict.FORBIDDEN,
        Code.UNIMPLEMENTED: Verdict.ABSENT,
    }
    return verdicts.get(code, Verdict.ADMITTED)


# --- HTTP


async def try_route(client: httpx.AsyncClient, endpoint: EndpointToTry, path: str, headers: Pairs) -> Verdict:
    """Return the verdict of a route without reading the whole answer, or None if the connection was refused."""
    method = endpoint.name.partition(" ")[0]
    if method == WEBSOCKET:
        return await _try_websocket(client, path, headers)
    content = b"{}" if method in ("POST", "PUT", "PATCH") else b""
    try:
        async with client.stream(method, path, headers=headers, content=content) as answer:
            code = answer.headers.get("penstock-code", "")
            is_absent = answer.status_code == 404 and not code
            if is_absent:
                is_absent = b"unknown_route" in await answer.aread() or b"there is no /" in answer.content
            return judge_status(answer.status_code, is_absent)
    except httpx.TimeoutException:
        return Verdict.ADMITTED
    except (httpx.HTTPError, ssl.SSLError):
        return Verdict.UNKNOWN


async def _try_websocket(client: httpx.AsyncClient, path: str, headers: Pairs) -> Verdict:
    url = str(client.base_url).replace("http", "ws", 1).rstrip("/") + path
    context = client.__dict__.get("tls")
    try:
        async with connect(url, additional_headers=headers, ssl=context, open_timeout=ANSWER_S):
            return Verdict.ADMITTED
    except InvalidStatus as error:
        return judge_status(error.response.status_code)
    except (OSError, WebSocketException):
        return Verdict.UNKNOWN


def judge_status(status: int, is_absent: bool = False) -> Verdict:
    if is_absent:
        return Verdict.ABSENT
    return {401: Verdict.UNKNOWN, 403: Verdict.FORBIDDEN}.get(status, Verdict.ADMITTED)


# --- findings


class Findings:
    """The callers that an endpoint admitted or refused by mistake."""

    def __init__(self) -> None:
        self.tried = 0
        self.endpoints: set[str] = set()
        self.open: list[str] = []
        self.shut: list[str] = []

    def note(self, endpoint: EndpointToTry, caller: Caller, verdict: Verdict, message: str = "") -> None:
        if verdict is Verdict.ABSENT:
            return
        self.tried += 1
        self.endpoints.add(str(endpoint))
        due = caller.get_expected_verdict(endpoint)
        if verdict is due:
            return
        list_ = self.open if verdict is Verdict.ADMITTED else self.shut
        list_.append(f"{endpoint} × {caller.name}: {verdict}, not {due} {message[:200]}".rstrip())

    def check_alike(self, what: str, answers: Sequence[object], is_refused: bool) -> None:
        """Check that refusals are indistinguishable from answers about something that does not exist."""
        self.tried += 1
        if not is_refused:
            self.open.append(f"{what}: answered")
        elif any(answer != answers[0] for answer in answers):
            self.open.append(f"{what}: told apart from what is not there: {answers}")
