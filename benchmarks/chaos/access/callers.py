"""Who tries doors, what they show there, and how doors answer them."""

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

from benchmarks.chaos.access.doors import WEBSOCKET, DoorToTry
from penstock.core.principals import Principal, Scope

ANSWER_S = 3.0  # after which a door that says nothing has let its caller in
Code: Any = grpc.StatusCode
Pairs = list[tuple[str, str]]


class Verdict(StrEnum):
    ADMITTED = "admitted"
    UNKNOWN = "unknown"  # nobody knows who it is
    FORBIDDEN = "forbidden"
    ABSENT = "absent"  # there is no such door


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    scopes: frozenset[Scope] | None = None  # none: nobody knows it
    headers: tuple[tuple[str, str], ...] = ()
    certificate: str = ""

    def due(self, door: DoorToTry) -> Verdict:
        if door.is_for_all:
            return Verdict.ADMITTED
        if self.scopes is None:
            return Verdict.UNKNOWN
        is_allowed = bool(door.needs) and Principal("", scopes=self.scopes).may(door.needs)
        return Verdict.ADMITTED if is_allowed else Verdict.FORBIDDEN


def shown(key: str, way: int = 0) -> tuple[tuple[str, str], ...]:
    """Each of the ways in which a key may be shown."""
    basic = b64encode(f"anybody:{key}".encode()).decode()
    ways = (("authorization", f"Bearer {key}"), ("x-api-key", key), ("authorization", f"Basic {basic}"))
    return (ways[way % len(ways)],)


# --- gRPC


async def try_method(
    channel: grpc.aio.Channel, door: DoorToTry, headers: Pairs, message: bytes = b""
) -> tuple[Verdict, str]:
    code, said = await answer_of_method(channel, door, headers, message)
    return verdict_of_code(code), f"{code.name} {said!r}"


async def answer_of_method(
    channel: grpc.aio.Channel, door: DoorToTry, headers: Pairs, message: bytes = b""
) -> tuple[Any, Any]:
    """Its code, and what was said; DEADLINE_EXCEEDED where it has said nothing."""
    is_stream = door.method is None or door.method.server_streaming
    make: Any = channel.unary_stream if is_stream else channel.unary_unary  # a stream of one looks the same
    call = make(door.name)(message, metadata=headers)
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


def verdict_of_code(code: Any) -> Verdict:
    verdicts = {
        Code.UNAUTHENTICATED: Verdict.UNKNOWN,
        Code.PERMISSION_DENIED: Verdict.FORBIDDEN,
        Code.UNIMPLEMENTED: Verdict.ABSENT,
    }
    return verdicts.get(code, Verdict.ADMITTED)


# --- HTTP


async def try_route(client: httpx.AsyncClient, door: DoorToTry, path: str, headers: Pairs) -> Verdict:
    """Without waiting for an answer's end: some have none. Who is not let into the connection is not known."""
    method = door.name.partition(" ")[0]
    if method == WEBSOCKET:
        return await _try_websocket(client, path, headers)
    content = b"{}" if method in ("POST", "PUT", "PATCH") else b""
    try:
        async with client.stream(method, path, headers=headers, content=content) as answer:
            code = answer.headers.get("penstock-code", "")
            is_absent = answer.status_code == 404 and not code
            if is_absent:
                is_absent = b"unknown_route" in await answer.aread() or b"there is no /" in answer.content
            return verdict_of_status(answer.status_code, is_absent)
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
        return verdict_of_status(error.response.status_code)
    except (OSError, WebSocketException):
        return Verdict.UNKNOWN


def verdict_of_status(status: int, is_absent: bool = False) -> Verdict:
    if is_absent:
        return Verdict.ABSENT
    return {401: Verdict.UNKNOWN, 403: Verdict.FORBIDDEN}.get(status, Verdict.ADMITTED)


# --- what was found


class Findings:
    """Of all who tried: those who were let in and should not have been, and the other way round."""

    def __init__(self) -> None:
        self.tried = 0
        self.doors: set[str] = set()
        self.open: list[str] = []
        self.shut: list[str] = []

    def note(self, door: DoorToTry, caller: Caller, found: Verdict, said: str = "") -> None:
        if found is Verdict.ABSENT:
            return
        self.tried += 1
        self.doors.add(str(door))
        due = caller.due(door)
        if found is due:
            return
        list_ = self.open if found is Verdict.ADMITTED else self.shut
        list_.append(f"{door} × {caller.name}: {found}, not {due} {said[:200]}".rstrip())

    def alike(self, what: str, answers: Sequence[object], is_refused: bool) -> None:
        """What a caller may not ask must be told of as what is not there."""
        self.tried += 1
        if not is_refused:
            self.open.append(f"{what}: answered")
        elif any(answer != answers[0] for answer in answers):
            self.open.append(f"{what}: told apart from what is not there: {answers}")
