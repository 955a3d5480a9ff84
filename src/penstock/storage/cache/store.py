"""Where cached answers are kept: what every store can do, and which of them a URL means."""

from pathlib import Path
from typing import Protocol

from penstock.core.config import CacheSettings
from penstock.core.errors import ConfigError
from penstock.storage.cache.lru import StoreCounts
from penstock.storage.cache.memory import MemoryStore
from penstock.storage.cache.redis import SETTING, RedisStore
from penstock.storage.cache.sqlite import SqliteStore
from penstock.storage.redis_link import store_kind

DEFAULT_FILE = "cache.db"


class CacheStore(Protocol):
    """`get` and `set` never fail: what the store cannot do is counted, and the request goes on without it.

    The others raise Unavailable where the store does not answer.
    """

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def get_now(self, key: bytes) -> bytes | None:
        """What is in this process's memory; `get` also looks behind it."""
        ...

    async def get(self, key: bytes) -> bytes | None: ...

    async def set(self, key: bytes, value: bytes, ttl_s: float) -> None: ...

    async def delete(self, key: bytes) -> bool:
        """Whether there was something to delete."""
        ...

    async def exists(self, key: bytes) -> bool: ...

    async def clear(self, prefix: bytes = b"") -> int:
        """Deletes the keys that begin so; returns how many."""
        ...

    def counts(self) -> StoreCounts: ...


def open_store(settings: CacheSettings, gateway_id: str, data_dir: Path) -> CacheStore:
    """Not started yet. Raises ConfigError for a URL that means no store."""
    match store_kind(settings.url, SETTING, "memory", "sqlite", "redis"):
        case "memory":
            return MemoryStore(settings.max_bytes)
        case "sqlite":
            path = settings.url.removeprefix("sqlite://")[1:]
            return SqliteStore(_file(path, gateway_id, data_dir), settings.max_bytes, settings.timeout_s)
    return RedisStore(settings.url, settings.timeout_s)


def _file(path: str, gateway_id: str, data_dir: Path) -> Path:
    """Each gateway has its own: their memories lie in front, and would not see each other's changes."""
    named = Path(path or DEFAULT_FILE)
    if not named.name:
        raise ConfigError(f"response_cache.url: sqlite:///{path} names no file")
    return data_dir / named.with_name(f"{named.stem}-{gateway_id}{named.suffix}")
