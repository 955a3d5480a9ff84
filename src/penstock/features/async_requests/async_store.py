"""The protocol of stores for asynchronous requests, which all gateways share, and the choice of a store by URL."""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from penstock.core.config import AsyncSettings
from penstock.core.errors import ConfigError
from penstock.features.async_requests.async_records import AsyncRecord, StoredAnswer
from penstock.features.async_requests.redis_requests import SETTING, RedisAsyncStore
from penstock.features.async_requests.sqlite_requests import SqliteAsyncStore
from penstock.storage.redis_link import find_store_kind

DEFAULT_FILE = "async-requests.db"


class AsyncStore(Protocol):
    """Stores records and answers until they expire. Methods raise Unavailable if the store does not answer."""

    async def add(self, record: AsyncRecord, now: float) -> None:
        """Add a record; raise Overloaded if the store is full."""
        ...

    async def get(self, request_id: str, now: float) -> AsyncRecord | None: ...

    async def get_answer(self, request_id: str) -> StoredAnswer | None: ...

    async def finish(self, record: AsyncRecord, answer: StoredAnswer) -> None:
        """Replace the record, and store its answer; raise Overloaded if there is no room for the answer."""
        ...

    async def ask_cancel(self, request_id: str) -> None: ...

    async def remove(self, request_id: str) -> None: ...

    async def renew(self, request_ids: Collection[str], alive_until: float) -> list[str]:
        """Extend the leases of running requests; return the ids of requests that are to be cancelled."""
        ...

    async def expire(self, now: float) -> None:
        """Delete the records and answers that have expired."""
        ...

    async def close(self) -> None: ...


def open_async_store(settings: AsyncSettings, data_dir: Path) -> AsyncStore:
    """Create the configured store, which is opened at its first use. Raise ConfigError for an unsupported URL."""
    if find_store_kind(settings.url, SETTING, "sqlite", "redis") == "redis":
        return RedisAsyncStore(settings)
    name = settings.url.removeprefix("sqlite://")[1:] or DEFAULT_FILE
    if not Path(name).name:
        raise ConfigError(f"{SETTING}: {settings.url} names no file: use sqlite:///NAME.db")
    return SqliteAsyncStore(data_dir / name, settings)
