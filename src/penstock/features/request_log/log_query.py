"""Queries of the request log, and their SQL. Pure: no I/O."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.features.request_log.log_row import ANSWERED

TABLE = "block_inference"
COLUMNS = (
    *("request_id", "ts", "session_id", "block_id", "seq_no", "client_ts"),
    *("frame_ptr", "data", "query_parameters", "output_ptr"),
    *("status", "key_id", "key_name", "protocol", "model", "version"),
    *("duration_ms", "request_bytes", "response_bytes", "data_bytes", "gateway"),
)  # in the order of LogRow's fields
INDEXES = {
    "session": "session_id, ts",
    "block": "block_id, ts",
    "ts": "ts, request_id",
    "client_ts": "client_ts",
    "key": "key_id, ts",
}
PARTIAL = ("session", "client_ts", "key")  # indexes without the rows that have no value
FAILED = "error"  # as a status: every status but `ok`
TimeColumn = Literal["ts", "client_ts"]


class LogCursor(NamedTuple):
    """The last row of a page."""

    time_us: int  # value of the column that orders the page
    request_id: str
    ts_us: int


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The conditions of a query, all of which a row must meet. An empty string or None means no condition."""

    session_id: str = ""
    request_id: str = ""
    block_id: str = ""
    key_id: str = ""  # only the requests of this key
    status: str = ""
    time: TimeColumn = "ts"  # the column of the time range and of the order
    since_us: int | None = None
    until_us: int | None = None  # not included
    is_oldest_first: bool = False
    after: LogCursor | None = None
    limit: int = 100


def build_sql(query: LogQuery, sign: str) -> tuple[str, list[Any]]:
    """Return the SQL statement of the query and its arguments. `sign` begins a placeholder: `$` or `?`."""
    values: list[Any] = []

    def mark(value: Any) -> str:
        values.append(value)
        return f"{sign}{len(values)}"

    time = query.time
    order = ("ts", "request_id") if time == "ts" else ("client_ts", "request_id", "ts")
    texts = {name: getattr(query, name) for name in ("session_id", "request_id", "block_id", "key_id")}
    found = [f"{name} = {mark(value)}" for name, value in texts.items() if value]
    if query.status:
        is_failed = query.status == FAILED
        found.append(f"status {'<>' if is_failed else '='} {mark(ANSWERED if is_failed else query.status)}")
    if time != "ts":
        found.append(f"{time} IS NOT NULL")
    if query.since_us is not None:
        found.append(f"{time} >= {mark(query.since_us)}")
    if query.until_us is not None:
        found.append(f"{time} < {mark(query.until_us)}")
    if query.after is not None:
        marks = ", ".join(mark(value) for value in query.after[: len(order)])
        found.append(f"({', '.join(order)}) {'>' if query.is_oldest_first else '<'} ({marks})")
    direction = "" if query.is_oldest_first else " DESC"
    return (
        f"SELECT {', '.join(COLUMNS)} FROM {TABLE}"
        + (f" WHERE {' AND '.join(found)}" if found else "")
        + f" ORDER BY {', '.join(name + direction for name in order)} LIMIT {mark(query.limit)}",
        values,
    )
