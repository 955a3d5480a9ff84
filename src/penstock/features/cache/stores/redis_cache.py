"""Cached answers in Redis. Gateways share the answers and keep no copies, so that deletions affect all."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import structlog

from penstock.core.errors import Unavailable
from penstock.features.cache.stores.lru import StoreCounts
from penstock.storage.outage import Outage
from penstock.storage.redis_link import open_redis

log = structlog.get_logger()
NAMESPACE = b"penstock:cache:"
SETTING = "response_cache.url"
CONNECTIONS = 32
SCANNED_AT_ONCE = 1000
CLEAR_S = 30.0  # limit for all calls of one `clear`
MAX_TTL_S = 315_360_000.0  # ten years: Redis counts milliseconds in 64 bits
_GLOB = re.compile(rb"([\\*?\[\]^-])")


class RedisStore:
    """A CacheStore in Redis."""

    name = "redis"

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._link = open_redis(url, SETTING, timeout_s, CONNECTIONS)
        self._redacted_url = self._link.address
        self._outage = Outage()
        self._has_logged_refusal = False
        self._errors = 0

    async def start(self) -> None:
        """Do nothing, because the first call connects."""

    async def close(self) -> None:
        await self._link.close()

    def get_now(self, key: bytes) -> bytes | None:
        return None

    async def get(self, key: bytes) -> bytes | None:
        with suppress(Unavailable):
            found: bytes | None = await self._call("GET", NAMESPACE + key)
            return found
        return None

    async def set(self, key: bytes, value: bytes, ttl_s: float) -> None:
        ttl_ms = max(1, int(min(ttl_s, MAX_TTL_S) * 1000))
        with suppress(Unavailable):
            await self._call("SET", NAMESPACE + key, value, "PX", ttl_ms)

    async def delete(self, key: bytes) -> bool:
        return bool(await self._call("UNLINK", NAMESPACE + key))

    async def exists(self, key: bytes) -> bool:
        return bool(await self._call("EXISTS", NAMESPACE + key))

    async def clear(self, prefix: bytes = b"") -> int:
        pattern = NAMESPACE + _GLOB.sub(rb"\\\1", prefix) + b"*"
        cursor, cleared = 0, 0
        deadline = self._clock() + CLEAR_S
        while self._clock() < deadline:
            answer = await self._call("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED_AT_ONCE)
            cursor, keys = int(answer[0]), answer[1]
            if keys:
                cleared += int(await self._call("UNLINK", *keys))
            if cursor == 0:
                return cleared
        raise Unavailable(
            f"the response cache at {self._redacted_url} was not cleared within {CLEAR_S:.0f} s; try again"
        )

    def get_counts(self) -> StoreCounts:
        """Return only the errors, because Redis itself counts its entries and bytes."""
        return StoreCounts(errors=self._errors)

    async def _call(self, *command: bytes | str | int) -> Any:
        link = self._link
        execute: Callable[..., Awaitable[Any]] = link.client.execute_command
        if not self._outage.may_try(self._clock()):
            self._errors += 1
            raise Unavailable(f"the response cache at {self._redacted_url} does not answer; try again later")
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await execute(*command)
        except link.refusal as error:
            self._count_refused_command(error)
            raise Unavailable(f"the response cache at {self._redacted_url} refuses the command: {error}") from error
        except link.faults as error:
            self._errors += 1
            if self._outage.record_failure(self._clock()):
                log.warning(
                    "cache_unavailable",
                    store=self.name,
                    place=self._redacted_url,
                    error=str(error) or type(error).__name__,
                )
            raise Unavailable(f"the response cache at {self._redacted_url} does not answer: {error}") from error
        if self._outage.record_success():
            log.info("cache_recovered", store=self.name, place=self._redacted_url)
        return answer

    def _count_refused_command(self, error: Exception) -> None:
        """Count a refused command; log the first. Reads may still work: Redis may be full or a read-only replica."""
        self._errors += 1
        if not self._has_logged_refusal:
            self._has_logged_refusal = True
            log.warning("cache_refused", store=self.name, place=self._redacted_url, error=str(error))
