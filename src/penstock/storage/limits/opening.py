"""Which store of limits a URL means."""

from penstock.core.errors import ConfigError
from penstock.storage.limits.base import LimitStore
from penstock.storage.limits.memory import MemoryLimitStore
from penstock.storage.limits.redis import SETTING, RedisLimitStore
from penstock.storage.redis_link import REDIS_SCHEMES


def open_limit_store(url: str, timeout_s: float, gateway_id: str) -> LimitStore:
    """Not started yet. Raises ConfigError for a URL that means no store."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "memory" and not rest:
        return MemoryLimitStore()
    if separator and scheme in REDIS_SCHEMES:
        return RedisLimitStore(url, timeout_s, gateway_id)
    # Not the whole URL: it may hold a password.
    raise ConfigError(
        f"{SETTING}: '{url.partition(':')[0][:20]}' means no store; it is memory://, redis://host:port/number, "
        "rediss://… or unix://socket"
    )
