"""Cached answers in Redis, shared by gateways. There is no memory in front: what others delete is gone at once."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import structlog

from penstock.core.errors import Unavailable
from penstock.storage.cache.lru import StoreCounts
from penstock.storage.outage import Outage
from penstock.storage.redis_link import open_redis

log = structlog.get_logger()
NAMESPACE = b"penstock:cache:"
SETTING = "response_cache.url"
CONNECTIONS = 32
SCANNED_AT_ONCE = 1000
CLEAR_S = 30.0  # of all the calls that clearing takes
MAX_TTL_S = 315_360_000.0  # ten years: Redis counts milliseconds in 64 bits
_GLOB = re.compile(rb"([\\*?\[\]^-])")


class RedisStore:
    name = "redis"

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._link = open_redis(url, SETTING, timeout_s, CONNECTIONS)
        self._place = self._link.place
        self._outage = Outage()
        self._has_told_refusal = False
        self._errors = 0

    async def start(self) -> None:
        """It connects with the first call."""

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
        raise Unavailable(f"the response cache at {self._place} was not cleared within {CLEAR_S:.0f} s: try again")

    def counts(self) -> StoreCounts:
        """Redis counts its entries and bytes itself."""
        return StoreCounts(errors=self._errors)

    async def _call(self, *command: bytes | str | int) -> Any:
        link = self._link
        execute: Callable[..., Awaitable[Any]] = link.client.execute_command
        if not self._outage.may_try(self._clock()):
            self._errors += 1
            raise Unavailable(f"the response cache at {self._place} does not answer")
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await execute(*command)
        except link.refusal as error:
            self._refused(error)
            raise Unavailable(f"the response cache at {self._place} refuses: {error}") from error
        except link.faults as error:
            self._errors += 1
            if self._outage.failed(self._clock()):
                log.warning("cache_away", store=self.name, place=self._place, error=str(error) or type(error).__name__)
            raise Unavailable(f"the response cache at {self._place} does not answer: {error}") from error
        if self._outage.worked():
            log.info("cache_back", store=self.name, place=self._place)
        return answer

    def _refused(self, error: Exception) -> None:
        """It answers, but not so: out of memory, or a replica that takes no writes. Reading may work all the same."""
        self._errors += 1
        if not self._has_told_refusal:
            self._has_told_refusal = True
            log.warning("cache_refused", store=self.name, place=self._place, error=str(error))
