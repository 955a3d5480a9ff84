"""REST answers of the administration: resources as plain values, in pages, with entity tags."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import orjson
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import InvalidRequest
from penstock.endpoints.http.openapi import JSON_FIELDS, SCHEMA_REFERENCE, make_json_answer
from penstock.endpoints.paging import GetSortKey, make_page, read_cursor, read_limit
from penstock.wire.plain_values import to_plain_values

DIGEST_BYTES = 6


def convert_to_plain(message: Message) -> dict[str, Any]:
    """Convert a message to the plain values that REST and the watch send."""
    found: dict[str, Any] = _to_plain(to_plain_values(message))
    return found


def answer_resource(message: Message, request: Request, status: int = 200, **further: object) -> Response:
    """Return an answer with a resource and its entity tag, if any; 304 if the caller already has this version."""
    values = {**convert_to_plain(message), **further}
    return (
        _answer_tagged(values, message.etag, request, status)
        if hasattr(message, "etag")
        else make_json_answer(values, status)
    )


def answer_combined_resource(values: dict[str, Any], request: Request) -> Response:
    """Return an answer with a resource whose tag is derived from the tags of its parts, or from all its values."""
    parts = [part.get("etag") or part for name in ("versions", "blocks") for part in values.get(name, ())]
    tag = blake2b(orjson.dumps(parts or values), digest_size=DIGEST_BYTES).hexdigest()
    return _answer_tagged(values, tag, request)


def _answer_tagged(values: dict[str, Any], tag: str, request: Request, status: int = 200) -> Response:
    headers = {"etag": f'"{tag}"', "cache-control": "no-cache"}
    if (
        status == 200
        and request.method == "GET"
        and _matches_any_tag(f'"{tag}"', request.headers.get("if-none-match", ""))
    ):
        return Response(status_code=304, headers=headers)
    return make_json_answer(values, status, headers)


def read_expected_tags(request: Request) -> str:
    """Return the tags of the If-Match header, in the form that managers expect."""
    return request.headers.get("if-match", "").replace("W/", "")


def answer_page(request: Request, items: Iterable[dict[str, Any]], order: GetSortKey) -> Response:
    """Return an answer with the page of items that follows the request's cursor."""
    limit, after = read_limit(request), read_cursor(request)
    ordered = sorted(items, key=order)
    try:
        following = [item for item in ordered if after is None or order(item) > after]
    except TypeError as error:
        raise InvalidRequest("the cursor belongs to another list: start again without a cursor") from error
    return make_page(following[:limit], order if len(following) > limit else None)


def describe_answer(name: str, *, is_list: bool = False, **further: Any) -> Mapping[str, Any]:
    """Return the OpenAPI schema of an answer: the message `name`, or a page of such messages."""
    schema: dict[str, Any] = {"$ref": SCHEMA_REFERENCE.format(model=name)}
    if is_list:
        cursor = {"type": ["string", "null"], "description": "Cursor of the next page; null: this is the last page"}
        fields = {"items": {"type": "array", "items": schema}, "next_cursor": cursor}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
    elif further:
        schema = {"allOf": [schema, {"type": "object", "properties": further}]}
    return {"application/json": {"schema": schema}}


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_plain(each) for name, each in value.items()} | _parse_documents(value)
    return [_to_plain(each) for each in value] if isinstance(value, list) else value


def _parse_documents(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: values[name] for name in JSON_FIELDS if isinstance(values.get(name), str | bytes)}
    return {name: orjson.loads(value or b"{}") for name, value in found.items()}


def _matches_any_tag(tag: str, tags: str) -> bool:
    return tags.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in tags.split(",")]
