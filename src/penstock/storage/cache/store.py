"""Where cached answers are kept: what every store can do, and which of them a URL means."""

from pathlib import Path
from typing import Protocol

from penstock.core.config import CacheSettings
from penstock.core.errors import ConfigError
from penstock.storage.cache.lru import StoreCounts
from penstock.storage.cache.memory import MemoryStore
from penstock.storage.cache.redis import RedisStore
from penstock.storage.cache.sqlite import SqliteStore
from penstock.storage.redis_link import REDIS_SCHEMES

DEFAULT_FILE = "cache.db"


class CacheStore(Protocol):
    """`get` and `set` never fail: what the store cannot do is counted, and the request goes on without it.

    The others raise Unavailable where the store does not answer.
    """

    @property
    def name(self) -> str: ...

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
    scheme, separator, rest = settings.url.partition("://")
    if separator and scheme == "memory" and not rest:
        return MemoryStore(settings.max_bytes)
    if separator and scheme == "sqlite" and rest[:1] in ("", "/"):
        return SqliteStore(_file(rest[1:], gateway_id, data_dir), settings.max_bytes, settings.timeout_s)
    if separator and scheme in REDIS_SCHEMES:
        return RedisStore(settings.url, settings.timeout_s)
    # Not the whole URL: it may hold a password.
    raise ConfigError(
        f"response_cache.url: '{scheme[:20]}' means no store; it is memory://, sqlite:///file, "
        "redis://host:port/number, rediss://… or unix://socket"
    )


def _file(path: str, gateway_id: str, data_dir: Path) -> Path:
    """Each gateway has its own: their memories lie in front, and would not see each other's changes."""
    named = Path(path or DEFAULT_FILE)
    if not named.name:
        raise ConfigError(f"response_cache.url: sqlite:///{path} names no file")
    return data_dir / named.with_name(f"{named.stem}-{gateway_id}{named.suffix}")
