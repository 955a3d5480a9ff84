"""Reading request bodies: in pieces, as a JSON document, or as a pydantic model."""

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from penstock.core.error_text import describe_first_problem
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.endpoints.json_size import check_json_nesting

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
