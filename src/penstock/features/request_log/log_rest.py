"""The routes that query the request log."""

from base64 import b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.principals import ADMIN_SCOPES, INFERENCE_SCOPES, Principal
from penstock.endpoints.http.openapi import Route, get_principal
from penstock.endpoints.paging import BAD_CURSOR, PAGING_PARAMETERS, make_page_ending_at, read_cursor, read_limit
from penstock.features.request_log.log_query import LogCursor, LogQuery
from penstock.features.request_log.log_row import LogRow, shorten_id
from penstock.features.request_log.request_log import RequestLog

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMES, ORDERS = ("ts", "client_ts"), ("newest", "oldest")
FILTERS = {
    "since": "Only requests at or after this time: ISO 8601 with a time zone, or seconds since 1970",
    "until": "Only requests before this time",
    "time": "The time of `since`, `until` and the order: `ts` (arrival, the default) or `client_ts`",
    "status": "Only requests with this status: `ok`, `error` (every failure) or the code of an error",
    "order": "`newest` first (the default) or `oldest` first",
    **PAGING_PARAMETERS,
}
DESCRIPTION = "A caller without the scope admin, or with a key for some models only, sees the requests of its own key."
NULLABLE = ("string", "null")
FIELDS: dict[str, Any] = {
    "request_id": "string",
    "ts": "string",
    "session_id": NULLABLE,
    "block_id": NULLABLE,
    "seq_no": ("integer", "null"),
    "client_ts": NULLABLE,
    "frame_ptr": NULLABLE,
    "data": NULLABLE,
    "query_parameters": NULLABLE,
    "output_ptr": NULLABLE,
    "status": "string",
    "key": NULLABLE,
    "protocol": "string",
    "model": "string",
    "version": "string",
    "duration_ms": "number",
    "request_bytes": "integer",
    "response_bytes": "integer",
    "data_bytes": "integer",
    "gateway": "string",
}
ITEM = {"type": "object", "properties": {name: {"type": kind} for name, kind in FIELDS.items()}}
PAGE = {
    "application/json": {
        "schema": {
            "type": "object",
            "properties": {"items": {"type": "array", "items": ITEM}, "next_cursor": {"type": NULLABLE}},
            "required": ["items", "next_cursor"],
        }
    }
}


class LogRest:
    def __init__(self, request_log: RequestLog | None) -> None:
        self._log = request_log

    @Route(
        "GET",
        "/logs",
        "List logged requests",
        DESCRIPTION,
        needs=INFERENCE_SCOPES,
        binary_answer=PAGE,
        query=FILTERS,
    )
    async def logs(self, request: Request) -> Response:
        return await self._answer_page(request, LogQuery())

    @Route(
        "GET",
        "/logs/session/{session_id:path}",
        "List the logged requests of a session",
        DESCRIPTION,
        needs=INFERENCE_SCOPES,
        binary_answer=PAGE,
        query=FILTERS,
    )
    async def session(self, request: Request) -> Response:
        return await self._answer_page(request, LogQuery(session_id=_read_path_id(request, "session_id")))

    @Route(
        "GET",
        "/logs/request/{request_id:path}",
        "List the logged requests with an id: several if a client used the id again",
        DESCRIPTION,
        needs=INFERENCE_SCOPES,
        binary_answer=PAGE,
        query=FILTERS,
    )
    async def request(self, request: Request) -> Response:
        return await self._answer_page(request, LogQuery(request_id=_read_path_id(request, "request_id")))

    @Route(
        "GET",
        "/logs/block/{block_id:path}",
        "List the logged requests of a block",
        DESCRIPTION,
        needs=INFERENCE_SCOPES,
        binary_answer=PAGE,
        query=FILTERS,
    )
    async def block(self, request: Request) -> Response:
        return await self._answer_page(request, LogQuery(block_id=_read_path_id(request, "block_id")))

    @Route(
        "GET",
        "/logs/session_block",
        "List the logged requests of a session to a block",
        DESCRIPTION,
        needs=INFERENCE_SCOPES,
        binary_answer=PAGE,
        query={"session_id": "Required", "block_id": "Required", **FILTERS},
    )
    async def session_block(self, request: Request) -> Response:
        ids = [request.query_params.get(name, "") for name in ("session_id", "block_id")]
        if not all(ids):
            raise InvalidRequest("give both session_id and block_id: /logs/session_block?session_id=…&block_id=…")
        session_id, block_id = map(shorten_id, ids)
        return await self._answer_page(request, LogQuery(session_id=session_id, block_id=block_id))

    async def _answer_page(self, request: Request, query: LogQuery) -> Response:
        if self._log is None:
            raise NotFound("this server keeps no request log: its operator may set request_log.url")
        query = _add_filters(query, request)
        limit = query.limit
        rows = await self._log.find(replace(query, limit=limit + 1))
        last = _make_cursor(rows[limit - 1], query) if len(rows) > limit else None
        return make_page_ending_at([show_row(row) for row in rows[:limit]], None if last is None else list(last))


def show_row(row: LogRow) -> dict[str, Any]:
    """Return a row as a JSON object. Bytes that are not UTF-8 become `{"base64": "…"}`."""
    found = row._asdict()
    return {
        "request_id": found.pop("request_id"),
        "ts": _show_time(found.pop("ts_us")),
        "session_id": found.pop("session_id"),
        "block_id": found.pop("block_id"),
        "seq_no": found.pop("seq_no"),
        "client_ts": _show_time(found.pop("client_ts_us")),
        **{name: _show_bytes(found.pop(name)) for name in ("frame_ptr", "data", "query_parameters", "output_ptr")},
        "status": found.pop("status"),
        "key": found.pop("key_name"),
        **{name: value for name, value in found.items() if name != "key_id"},
    }


def _read_path_id(request: Request, name: str) -> str:
    return shorten_id(request.path_params[name])


def _add_filters(query: LogQuery, request: Request) -> LogQuery:
    given = request.query_params
    time, order = given.get("time", TIMES[0]), given.get("order", ORDERS[0])
    if time not in TIMES:
        raise InvalidRequest(f"time is '{time[:40]}': it must be {' or '.join(TIMES)}")
    if order not in ORDERS:
        raise InvalidRequest(f"order is '{order[:40]}': it must be {' or '.join(ORDERS)}")
    return replace(
        query,
        key_id=_find_visible_key(get_principal(request)),
        status=shorten_id(given.get("status", "")),
        time="ts" if time == "ts" else "client_ts",
        since_us=_read_time(given.get("since", ""), "since"),
        until_us=_read_time(given.get("until", ""), "until"),
        is_oldest_first=order == "oldest",
        after=_read_cursor(request),
        limit=read_limit(request),
    )


def _find_visible_key(principal: Principal) -> str:
    """Return the id of the key whose requests the caller may see; an empty string means all requests."""
    return "" if principal.may(ADMIN_SCOPES) and not principal.is_restricted else principal.key_id


def _make_cursor(row: LogRow, query: LogQuery) -> LogCursor:
    time_us = row.ts_us if query.time == "ts" else row.client_ts_us
    assert time_us is not None
    return LogCursor(time_us, row.request_id, row.ts_us)


def _read_cursor(request: Request) -> LogCursor | None:
    match read_cursor(request):
        case None:
            return None
        case [int(time_us), str(request_id), int(ts_us)]:
            return LogCursor(_check_bounds(time_us), shorten_id(request_id), _check_bounds(ts_us))
    raise InvalidRequest(BAD_CURSOR)


def _check_bounds(us: int) -> int:
    if not 0 <= us < 253_402_300_800_000_000:
        raise InvalidRequest(BAD_CURSOR)
    return us


def _read_time(text: str, name: str) -> int | None:
    """Return a time in microseconds since 1970."""
    if not text:
        return None
    try:
        if text.replace(".", "", 1).isdecimal() and len(text) < 24:
            return (EPOCH + timedelta(seconds=float(text)) - EPOCH) // timedelta(microseconds=1)
        # In a URL, the + of a time zone is a space unless it is escaped.
        found = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        if found.tzinfo is None:
            raise ValueError("it has no time zone")
        return max(0, (found - EPOCH) // timedelta(microseconds=1))
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"{name} is '{text[:40]}': it must be a time such as 2026-01-31T12:00:00Z, or seconds since 1970"
        ) from error


def _show_time(us: int | None) -> str | None:
    if us is None:
        return None
    return (EPOCH + timedelta(microseconds=us)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _show_bytes(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        if (
            error.start >= len(value) - 3 and error.reason == "unexpected end of data"
        ):  # the value was cut inside a character
            return value[: error.start].decode()
        return {"base64": b64encode(value).decode()}
