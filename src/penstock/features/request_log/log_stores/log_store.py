"""The protocol of a store of the request log, and the choice of a store by URL."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.core.config import RequestLogSettings
from penstock.core.errors import ConfigError
from penstock.features.request_log.log_query import LogQuery
from penstock.features.request_log.log_row import LogRow

SETTING = "request_log.url"


class WriteResult(NamedTuple):
    """The result of writing a batch of rows."""

    rows: int
    rejected: int = 0  # number of rows that the store refused, and would refuse again


class LogStore(Protocol):
    """Stores rows and finds them again. While the store is unavailable, methods raise one of `faults`."""

    name: str
    place: str  # the URL's host or file for messages, without a password

    @property
    def faults(self) -> tuple[type[Exception], ...]: ...

    async def write(self, rows: Sequence[LogRow]) -> WriteResult:
        """Write a batch. After a fault, call this again with the same rows; no row is written twice."""
        ...

    async def find(self, query: LogQuery) -> list[LogRow]: ...

    async def delete_expired(self, now_us: int) -> int:
        """Remove old rows, and prepare for new rows; return the number of removed rows, partitions or chunks."""
        ...

    async def close(self) -> None: ...


def open_log_store(settings: RequestLogSettings, data_dir: Path) -> LogStore:
    """Create the configured store, which connects at its first call. Raise ConfigError for an invalid URL."""
    scheme, separator, rest = settings.url.partition("://")
    if separator and scheme == "sqlite" and rest.startswith("/") and Path(rest[1:]).name:
        from penstock.features.request_log.log_stores.sqlite_log import SqliteLog

        return SqliteLog(data_dir / rest[1:], settings)
    if separator and scheme in ("postgresql", "postgres"):
        # Imported here because few servers need it.
        from penstock.features.request_log.log_stores.postgres_log import PostgresLog

        return PostgresLog(settings)
    # Not the whole URL, which may contain a password.
    raise ConfigError(
        f"{SETTING}: '{scheme[:20]}' is not a store of the request log; give sqlite:///FILE or "
        "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
    )
