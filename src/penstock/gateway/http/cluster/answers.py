"""How the resources of a cluster are told over REST: as plain values, in pages, with tags.

A page ends with a cursor: the place of its last item in an order that changes keep (ids, names, or numbers that only
rise). So whatever is added or removed meanwhile, nothing that stays is told twice or left out.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import orjson
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import InvalidRequest
from penstock.gateway.http.openapi import AS_JSON, REF, json_answer
from penstock.wire.values import as_values

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
DIGEST_BYTES = 6
PAGING = {
    "limit": f"Most items in the answer: 1 to {MAX_LIMIT}, or else {DEFAULT_LIMIT}",
    "cursor": "`next_cursor` of the page before",
}
Order = Callable[[dict[str, Any]], Any]


def told(message: Message) -> dict[str, Any]:
    """A resource as it is answered and pushed."""
    found: dict[str, Any] = _told(as_values(message))
    return found


def resource(message: Message, request: Request, status: int = 200, **further: object) -> Response:
    """With its tag, if it has one; 304 where the caller has it."""
    values = {**told(message), **further}
    return _tagged(values, message.etag, request, status) if hasattr(message, "etag") else json_answer(values, status)


def resource_of(values: dict[str, Any], request: Request) -> Response:
    """One whose tag is made of the tags of its parts, or of all that is told of it."""
    parts = [part.get("etag") or part for name in ("versions", "blocks") for part in values.get(name, ())]
    tag = blake2b(orjson.dumps(parts or values), digest_size=DIGEST_BYTES).hexdigest()
    return _tagged(values, tag, request)


def _tagged(values: dict[str, Any], tag: str, request: Request, status: int = 200) -> Response:
    headers = {"etag": f'"{tag}"', "cache-control": "no-cache"}
    if status == 200 and request.method == "GET" and _is_among(f'"{tag}"', request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return json_answer(values, status, headers)


def expected(request: Request) -> str:
    """The tags of which one must be of the last write, as managers take them."""
    return request.headers.get("if-match", "").replace("W/", "")


def limit_of(request: Request) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not given.isdecimal() or not 1 <= int(given[:8]) <= MAX_LIMIT:
        raise InvalidRequest(f"limit is '{given[:40]}': it must be a number from 1 to {MAX_LIMIT}")
    return int(given)


def cursor_of(request: Request) -> Any:
    """Where the page before ended; None: it is the first."""
    given = request.query_params.get("cursor", "")
    if not given:
        return None
    try:
        return orjson.loads(urlsafe_b64decode(given.encode() + b"=" * (-len(given) % 4)))
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("cursor is none that was given: take `next_cursor` of the page before") from error


def page(request: Request, items: Iterable[dict[str, Any]], order: Order) -> Response:
    """Of all items, those behind the cursor."""
    limit, after = limit_of(request), cursor_of(request)
    ordered = sorted(items, key=order)
    try:
        behind = [item for item in ordered if after is None or order(item) > after]
    except TypeError as error:
        raise InvalidRequest("cursor is of another list: begin anew without it") from error
    return page_of(behind[:limit], order if len(behind) > limit else None)


def page_of(items: list[dict[str, Any]], order: Order | None) -> Response:
    """`order`: there is more behind them."""
    cursor = urlsafe_b64encode(orjson.dumps(order(items[-1]))).rstrip(b"=").decode() if order and items else None
    return json_answer({"items": items, "next_cursor": cursor}, headers={"cache-control": "no-cache"})


def documented(name: str, *, is_list: bool = False, **further: Any) -> Mapping[str, Any]:
    """The answer of a route, as OpenAPI has it: this message, or a page of it."""
    schema: dict[str, Any] = {"$ref": REF.format(model=name)}
    if is_list:
        cursor = {"type": ["string", "null"], "description": "Of the next page; null: there is none"}
        fields = {"items": {"type": "array", "items": schema}, "next_cursor": cursor}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
    elif further:
        schema = {"allOf": [schema, {"type": "object", "properties": further}]}
    return {"application/json": {"schema": schema}}


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _told(each) for name, each in value.items()} | _opened(value)
    return [_told(each) for each in value] if isinstance(value, list) else value


def _opened(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: values[name] for name in AS_JSON if isinstance(values.get(name), str | bytes)}
    return {name: orjson.loads(value or b"{}") for name, value in found.items()}


def _is_among(tag: str, tags: str) -> bool:
    return tags.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in tags.split(",")]
