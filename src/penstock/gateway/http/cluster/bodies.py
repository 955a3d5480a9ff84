"""Bodies of requests, read as they come."""

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from penstock.core.error_text import first_problem
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.core.manifest import MAX_MANIFEST_BYTES

B = TypeVar("B", bound=BaseModel)
PIECE_BYTES = 512 * 1024


async def pieces_of(request: Request) -> AsyncIterator[bytes]:
    """In pieces that are worth a write; what came before it was cut is not lost."""
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


async def document_of(request: Request) -> dict[str, Any]:
    """A JSON object; an empty body is an empty one."""
    body = b""
    async for piece in pieces_of(request):
        body += piece
        if len(body) > MAX_MANIFEST_BYTES:
            raise RequestTooLarge(f"the body is over {MAX_MANIFEST_BYTES} bytes")
    try:
        document = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidRequest("the body is not a JSON object")
    return document


async def body_of(request: Request, kind: type[B]) -> B:
    try:
        return kind.model_validate(await document_of(request))
    except ValidationError as error:
        raise InvalidRequest(first_problem(error, "the body")) from error
