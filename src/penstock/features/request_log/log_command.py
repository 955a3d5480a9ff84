"""`penstock log`: show the request log of a server."""

import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from penstock.core.errors import InvalidRequest, Unavailable
from penstock.terminal.http import open_path
from penstock.terminal.output import escape_controls, print_json
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson

TIMEOUT_S = 15.0
POLL_S = 1.0
MAX_LISTED = 1000
LATE_S = 60.0  # --follow shows requests that took at most this long
AGO = re.compile(r"(\d{1,9})([smhd])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
WIDTHS = {"time": 18, "status": 11, "ms": 8, "model": 10, "session": 11, "request": 12}  # a line has 80 columns


@takes_server
def log(
    server: Server,
    session: Annotated[str, typer.Option(help="Show only this session. [default: all]")] = "",
    request: Annotated[str, typer.Option(help="Show only requests with this id. [default: all]")] = "",
    block: Annotated[str, typer.Option(help="Show only this block, by its id. [default: all]")] = "",
    status: Annotated[
        str, typer.Option(help="Show only requests with this status: ok, error, or an error's code. [default: all]")
    ] = "",
    since: Annotated[
        str, typer.Option(help="Show requests since 15m, 2h, 7d ago, or a time like 2026-01-31T12:00. [default: all]")
    ] = "",
    until: Annotated[
        str, typer.Option(help="Show requests before a time, in the forms of --since. [default: now]")
    ] = "",
    client_time: Annotated[
        bool, typer.Option("--client-time", help="Use the time that packets carry instead of the time of arrival.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=MAX_LISTED, help="Show at most this many requests, the newest.")
    ] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep running and show new requests.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the request log of a server, oldest request first.

    With --json, every line is a JSON object with all fields, including the payload.
    """
    path, query = _build_query_path(session, request, block)
    query |= {"since": _read_time(since), "until": _read_time(until), "status": status}
    query["time"] = "client_ts" if client_time else ""
    found = _fetch_rows(server, path, query | {"limit": str(limit)})[::-1]
    if not found and not follow:
        print("no logged request matches", file=sys.stderr)
    elif request and not as_json:
        print("\n\n".join(map(_format_details, found)))
    else:
        if not as_json:
            print("  ".join(name.ljust(width) for name, width in WIDTHS.items()).rstrip())
        _print_rows(found, as_json)
    if follow:
        for page in _follow(server, path, query, found):
            _print_rows(page, as_json)


def _build_query_path(session: str, request: str, block: str) -> tuple[str, dict[str, str]]:
    """Return the URL path that lists the requests with these ids, and its query parameters."""
    if session and block and not request:
        return "/logs/session_block", {"session_id": session, "block_id": block}
    given = [(kind, each) for kind, each in (("session", session), ("request", request), ("block", block)) if each]
    if len(given) > 1:
        raise InvalidRequest("--request cannot be combined with --session or --block")
    return "/".join(["/logs", *(f"{kind}/{quote(each, safe='')}" for kind, each in given)]), {}


def _fetch_rows(server: Server, path: str, query: dict[str, str]) -> list[dict[str, Any]]:
    url = f"{path}?{urlencode({name: value for name, value in query.items() if value})}"
    with open_path(server.access, server.http, url, TIMEOUT_S) as answer:
        try:
            return list(json.load(answer)["items"])
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{server.http} sent no request log: is that an address of `penstock serve`?") from error


def _follow(
    server: Server, path: str, query: dict[str, str], found: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Yield new rows. Also look for earlier arrivals, because a request is logged only when it ends."""
    seen = {(row["request_id"], row["ts"]) for row in found}
    after = found[-1]["ts"] if found else datetime.now(UTC).isoformat()
    while True:
        time.sleep(POLL_S)
        asked = query | {"since": str(time.time() - LATE_S), "time": "", "order": "oldest", "limit": str(MAX_LISTED)}
        try:
            rows = _fetch_rows(server, path, asked)
        except Unavailable as error:  # the server may be restarting: try again
            typer.echo(f"penstock: {error.message}", err=True)
            continue
        new = [row for row in rows if (row["request_id"], row["ts"]) not in seen and row["ts"] > after]
        seen, after = {(row["request_id"], row["ts"]) for row in rows}, ""
        yield new


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    for row in rows:
        print_json(row, None) if as_json else print(_format_line(row))
    sys.stdout.flush()


def _format_line(row: dict[str, Any]) -> str:
    shown = {
        "time": f"{datetime.fromisoformat(row['ts']).astimezone():%m-%d %H:%M:%S.%f}"[:18],
        "status": row["status"],
        "ms": f"{row['duration_ms']:.1f}",
        "model": row["model"],
        "session": row["session_id"] or "",
        "request": row["request_id"],
    }
    return "  ".join(_truncate(escape_controls(shown[name]), width) for name, width in WIDTHS.items()).rstrip()


def _truncate(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _format_details(row: dict[str, Any]) -> str:
    shown = {name: json.dumps(each) if isinstance(each, dict) else each for name, each in row.items()}
    return "\n".join(f"{name:16}{escape_controls(str(each))}" for name, each in shown.items() if each not in (None, ""))


def _read_time(text: str) -> str:
    """Return a time for the query: `2h` means two hours ago, and a time without a zone is local."""
    if not text:
        return ""
    if matched := AGO.fullmatch(text):
        return str(time.time() - timedelta(**{UNITS[matched[2]]: int(matched[1])}).total_seconds())
    try:
        return str(datetime.fromisoformat(text).astimezone().timestamp())
    except ValueError as error:
        raise InvalidRequest(f"'{text[:40]}' is not a time: give 15m, 2h, 7d, or 2026-01-31T12:00") from error
