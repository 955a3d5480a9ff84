"""Reading request bodies: in pieces, as a JSON document, as a pydantic model, or when there is room for them."""

from collections.abc import AsyncIterator, MutableMapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from penstock.core.error_text import describe_first_problem
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.endpoints.held_bytes import Claim, Room
from penstock.endpoints.http.http_message import Receive, Scope
from penstock.endpoints.json_size import check_json_nesting
from penstock.endpoints.large_messages import HUGE_BYTES

B = TypeVar("B", bound=BaseModel)
PIECE_BYTES = 512 * 1024
MAX_DOCUMENT_BYTES = 3 * 1024 * 1024  # most documents become gRPC messages, which have at most 4 MiB


async def read_pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces of about PIECE_BYTES. If the client disconnects, yield the rest before raising."""
    stream = request.stream()
    held = bytearray()
    failure: ClientDisconnect | None = None
    is_over = False
    while not is_over:
        try:
            piece = await anext(stream, b"")
            is_over = not piece
            held += piece
        except ClientDisconnect as error:
            failure = error
        if held and (is_over or failure is not None or len(held) >= PIECE_BYTES):
            yield bytes(held)
            held.clear()
        if failure is not None:
            raise failure


async def read_json_document(request: Request) -> dict[str, Any]:
    """Return the body's JSON object; an empty body is an empty object."""
    body = b""
    async for piece in read_pieces(request):
        body += piece
        if len(body) > MAX_DOCUMENT_BYTES:
            raise RequestTooLarge(f"the body is over {MAX_DOCUMENT_BYTES} bytes: send less")
    try:
        document = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    check_json_nesting(body, document)
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    return document


async def read_body_as(request: Request, model: type[B]) -> B:
    try:
        return model.model_validate(await read_json_document(request))
    except ValidationError as error:
        raise InvalidRequest(describe_first_problem(error, "the body")) from error


class LargeBody:
    """The `receive` of a request, which waits for room before it returns more than HUGE_BYTES of the body.

    Routes read the body after the guard has admitted the caller, so strangers get no room.
    """

    def __init__(self, receive: Receive, declared_bytes: int | None, room: Room, max_message_bytes: int) -> None:
        """Read nothing yet. `declared_bytes`: the size of the body; None if the client has not declared the size."""
        self._receive = receive
        self._claim = Claim(room)
        self._has_arrived = False
        self._free_bytes = 0 if declared_bytes is not None else HUGE_BYTES  # that need no room
        self._expected_bytes = max_message_bytes if declared_bytes is None else min(declared_bytes, max_message_bytes)
        self._size_bytes = 0

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._has_arrived:
            return await self._receive()
        if not self._claim.bytes and self._size_bytes >= self._free_bytes:
            await self._claim.take(self._expected_bytes)
        if not self._claim.bytes:
            message = await self._receive()
        else:
            message = await self._claim.arrive(self._receive())
        self._size_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            self._has_arrived = True
            self._claim.note_arrival(self._size_bytes)
        return message

    def release(self) -> None:
        self._claim.release()


def wrap_large_body(scope: Scope, receive: Receive, room: Room, max_message_bytes: int) -> LargeBody | None:
    """Return the `receive` of a request whose body may be large, or None if the body is small."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return LargeBody(receive, None, room, max_message_bytes)
    declared = headers.get(b"content-length", b"0")
    size = int(declared) if declared.isdigit() and len(declared) <= 18 else max_message_bytes
    return None if size <= HUGE_BYTES else LargeBody(receive, size, room, max_message_bytes)
