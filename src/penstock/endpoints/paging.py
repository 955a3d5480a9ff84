"""Lists in pages: `limit` and `cursor` of a request, and `items` and `next_cursor` of its answer.

A cursor is the sort key of a page's last item, so items that are added or removed between two pages neither repeat nor
hide other items.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import InvalidRequest
from penstock.endpoints.http.openapi import make_json_answer

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
PAGING_PARAMETERS = {
    "limit": f"Maximum number of items: 1 to {MAX_LIMIT}, by default {DEFAULT_LIMIT}",
    "cursor": "`next_cursor` of the previous page",
}
BAD_CURSOR = "invalid cursor: pass `next_cursor` from the previous page"
GetSortKey = Callable[[dict[str, Any]], Any]


def read_limit(request: Request) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not given.isdecimal() or not 1 <= int(given[:8]) <= MAX_LIMIT:
        raise InvalidRequest(f"limit is '{given[:40]}': it must be a number from 1 to {MAX_LIMIT}")
    return int(given)


def read_cursor(request: Request) -> Any:
    """Return the sort key of the previous page's last item, or None for the first page."""
    given = request.query_params.get("cursor", "")
    if not given:
        return None
    try:
        return orjson.loads(urlsafe_b64decode(given.encode() + b"=" * (-len(given) % 4)))
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(BAD_CURSOR) from error


def make_page(items: list[dict[str, Any]], order: GetSortKey | None) -> Response:
    """Return an answer with these items. If more items follow, `order` returns an item's sort key, for the cursor."""
    return make_page_ending_at(items, order(items[-1]) if order and items else None)


def make_page_ending_at(items: list[dict[str, Any]], last_key: Any) -> Response:
    """Return an answer with these items. `last_key` is the last item's sort key, or None if no items follow."""
    cursor = None if last_key is None else urlsafe_b64encode(orjson.dumps(last_key)).rstrip(b"=").decode()
    return make_json_answer({"items": items, "next_cursor": cursor}, headers={"cache-control": "no-cache"})
