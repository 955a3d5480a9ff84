"""Redis by its URL, for every store that may be kept there."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = structlog.get_logger()
REDIS_SCHEMES = ("redis", "rediss", "unix")
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class RedisLink:
    """Connects with the first call: a gateway serves whether Redis is there or not."""

    client: "Redis"
    faults: tuple[type[Exception], ...]  # what its calls raise
    refusal: type[Exception]  # of these, where it answers, but not so

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.client.aclose()
        except self.faults as error:
            log.debug("redis_close_failed", error=str(error))


def open_redis(url: str, setting: str, timeout_s: float, connections: int) -> RedisLink:
    try:
        # Here and not above: it takes 0.4 s to import, and few servers need it.
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError, ResponseError
    except ImportError as error:
        raise ConfigError(f"{setting}: Redis needs the 'redis' package: pip install 'redis[hiredis]'") from error
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # the next call is the next try, and what ran does not run again unseen
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"{setting} at {place_of(url, setting)}: {error}") from error
    return RedisLink(Redis.from_pool(pool), (RedisError, OSError, TimeoutError), ResponseError)


def place_of(url: str, setting: str) -> str:
    """The URL without its password."""
    try:
        parts = urlsplit(url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from error
