"""The protocol of stores for cached answers, and the choice of a store by URL."""

from pathlib import Path
from typing import Protocol

from penstock.core.config import CacheSettings
from penstock.core.errors import ConfigError
from penstock.features.cache.stores.lru import StoreCounts
from penstock.features.cache.stores.memory_cache import MemoryStore
from penstock.features.cache.stores.redis_cache import SETTING, RedisStore
from penstock.features.cache.stores.sqlite_cache import SqliteStore
from penstock.storage.redis_link import find_store_kind

DEFAULT_FILE = "cache.db"
CALL_S = 0.05  # for an answer from Redis or a file; after this time, a small model has computed the answer itself


class CacheStore(Protocol):
    """Stores encoded answers by key.

    `get` and `set` never raise: failures are counted, and the request continues without the cache. The other methods
    raise Unavailable if the store does not answer.
    """

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def get_now(self, key: bytes) -> bytes | None:
        """Return the value if it is in this process's memory. Unlike `get`, do not read the file or the server."""
        ...

    async def get(self, key: bytes) -> bytes | None: ...

    async def set(self, key: bytes, value: bytes, ttl_s: float) -> None: ...

    async def delete(self, key: bytes) -> bool:
        """Delete the key; return whether it existed."""
        ...

    async def exists(self, key: bytes) -> bool: ...

    async def clear(self, prefix: bytes = b"") -> int:
        """Delete all keys with this prefix; return their number."""
        ...

    def get_counts(self) -> StoreCounts: ...


def open_store(settings: CacheSettings, gateway_id: str, data_dir: Path, timeout_s: float = CALL_S) -> CacheStore:
    """Create the configured store, not started. Raise ConfigError if the URL's scheme is not supported."""
    match find_store_kind(settings.url, SETTING, "memory", "sqlite", "redis"):
        case "memory":
            return MemoryStore(settings.max_bytes)
        case "sqlite":
            path = settings.url.removeprefix("sqlite://")[1:]
            return SqliteStore(_find_gateway_file(path, gateway_id, data_dir), settings.max_bytes, timeout_s)
    return RedisStore(settings.url, timeout_s)


def _find_gateway_file(path: str, gateway_id: str, data_dir: Path) -> Path:
    """Return this gateway's own file. Gateways cannot share a file, because each holds the file's index in memory."""
    named = Path(path or DEFAULT_FILE)
    if not named.name:
        raise ConfigError(f"response_cache.url: sqlite:///{path} names no file: use sqlite:///NAME.db")
    return data_dir / named.with_name(f"{named.stem}-{gateway_id}{named.suffix}")
