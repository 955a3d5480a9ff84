"""Asynchronous requests in Redis, which all gateways of a cluster share.

Each change is one script, so that the limits hold even if several gateways store requests at once.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict
from typing import Any

from penstock.core.config import AsyncSettings
from penstock.core.errors import StoreUnavailable
from penstock.features.async_requests.async_records import AsyncRecord, AsyncState, StoredAnswer
from penstock.features.async_requests.sqlite_requests import limit_stored_bytes, make_full_error
from penstock.storage.redis_link import open_redis

SETTING = "async_requests.url"
# Keys: a hash per request, all ids sorted by expiry time, the sizes of answers by id, and their sum.
REQUEST, EXPIRY, SIZES, TOTAL = (f"penstock:async:{name}" for name in ("request:", "expiry", "sizes", "total"))
RECORD, ALIVE, CANCEL, TYPE, BODY = "record", "alive_until", "is_cancel_asked", "content_type", "body"
CALL_S = 5.0
CONNECTIONS = 8
MARGIN_S = 60.0  # Redis itself deletes a request this long after it has expired
MAX_DELETED_AT_ONCE = 1000  # maximum number of requests that one call deletes

# KEYS: expiry, sizes, total. ARGV begins with the prefix of requests' keys.
_HEAD = """
local expiry, sizes, total, prefix = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local function set_size(id, size)
    redis.call('INCRBY', total, size - (redis.call('HGET', sizes, id) or 0))
    if size > 0 then redis.call('HSET', sizes, id, size) else redis.call('HDEL', sizes, id) end
end
local function remove(id)
    set_size(id, 0)
    redis.call('ZREM', expiry, id)
    redis.call('UNLINK', prefix .. id)
end
local function expire(now, most)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, most)) do remove(id) end
end
local function put(id, expires_at, delete_at, first)
    redis.call('HSET', prefix .. id, unpack(ARGV, first))
    redis.call('EXPIREAT', prefix .. id, delete_at)
    redis.call('ZADD', expiry, expires_at, id)
end
"""
_ADD = f"""{_HEAD}
local id, now, most, max_requests, max_bytes, expires_at, delete_at = unpack(ARGV, 2, 8)
expire(now, most)
if redis.call('ZCARD', expiry) >= tonumber(max_requests) then return 0 end
if tonumber(redis.call('GET', total) or 0) >= tonumber(max_bytes) then return 0 end
put(id, expires_at, delete_at, 9)
return 1
"""
# A request that was removed meanwhile is not stored again.
_FINISH = f"""{_HEAD}
local id, size, max_bytes, expires_at, delete_at = unpack(ARGV, 2, 6)
if redis.call('EXISTS', prefix .. id) == 0 then return 1 end
local others = tonumber(redis.call('GET', total) or 0) - (redis.call('HGET', sizes, id) or 0)
if others + size > tonumber(max_bytes) then return 0 end
set_size(id, tonumber(size))
put(id, expires_at, delete_at, 7)
return 1
"""
_SET = """
local asked = {}
for index = 4, #ARGV do
    local key = ARGV[1] .. ARGV[index]
    if redis.call('EXISTS', key) == 1 then
        redis.call('HSET', key, ARGV[2], ARGV[3])
        if redis.call('HGET', key, 'is_cancel_asked') == '1' then table.insert(asked, ARGV[index]) end
    end
end
return asked
"""
_REMOVE = f"""{_HEAD}
remove(ARGV[2])
"""
_EXPIRE = f"""{_HEAD}
expire(ARGV[2], ARGV[3])
"""
SCRIPTS = (_ADD, _FINISH, _SET, _REMOVE, _EXPIRE)


class RedisAsyncStore:
    """An AsyncStore in Redis."""

    def __init__(self, settings: AsyncSettings) -> None:
        self._settings = settings
        self._link = link = open_redis(settings.url, SETTING, CALL_S, CONNECTIONS)
        self._scripts: dict[str, Callable[..., Awaitable[Any]]] = {
            script: link.client.register_script(script) for script in SCRIPTS
        }

    async def add(self, record: AsyncRecord, now: float) -> None:
        most = (self._settings.max_requests, self._settings.max_bytes)
        if not await self._run(_ADD, record.request_id, now, MAX_DELETED_AT_ONCE, *most, *_record_fields(record)):
            raise make_full_error(self._settings)

    async def get(self, request_id: str, now: float) -> AsyncRecord | None:
        text, alive_until, cancel = await self._read_fields(request_id, RECORD, ALIVE, CANCEL)
        if text is None:
            return None
        found = json.loads(text)
        found |= {"state": AsyncState(found["state"]), ALIVE: float(alive_until), CANCEL: cancel == b"1"}
        record = AsyncRecord(**found)
        return record if record.expires_at > now else None

    async def get_answer(self, request_id: str) -> StoredAnswer | None:
        text, kind, body = await self._read_fields(request_id, RECORD, TYPE, BODY)
        if text is None or body is None:
            return None
        return StoredAnswer(int(json.loads(text)["status"]), kind.decode(), bytes(body))

    async def finish(self, record: AsyncRecord, answer: StoredAnswer) -> None:
        size, fields = len(answer.body), (TYPE, answer.content_type, BODY, answer.body)
        if not await self._run(
            _FINISH,
            record.request_id,
            size,
            limit_stored_bytes(self._settings, answer),
            *_record_fields(record),
            *fields,
        ):
            raise make_full_error(self._settings)

    async def ask_cancel(self, request_id: str) -> None:
        await self._run(_SET, CANCEL, "1", request_id)

    async def remove(self, request_id: str) -> None:
        await self._run(_REMOVE, request_id)

    async def renew(self, request_ids: Collection[str], alive_until: float) -> list[str]:
        return [each.decode() for each in await self._run(_SET, ALIVE, alive_until, *request_ids)]

    async def expire(self, now: float) -> None:
        await self._run(_EXPIRE, now, MAX_DELETED_AT_ONCE)

    async def close(self) -> None:
        await self._link.close()

    async def _run(self, script: str, *arguments: str | bytes | float) -> Any:
        return await self._await_redis(self._scripts[script](keys=[EXPIRY, SIZES, TOTAL], args=(REQUEST, *arguments)))

    async def _read_fields(self, request_id: str, *names: str) -> Any:
        execute: Callable[..., Awaitable[Any]] = self._link.client.execute_command
        return await self._await_redis(execute("HMGET", REQUEST + request_id, *names))

    async def _await_redis(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except self._link.faults as error:
            raise StoreUnavailable(
                f"the store of asynchronous requests at {self._link.address} does not answer: {error}"
            ) from error


def _record_fields(record: AsyncRecord) -> tuple[str | float, ...]:
    """Return the record's expiry, the time when Redis deletes it, and its fields, except CANCEL."""
    delete_at = int(record.expires_at + MARGIN_S)
    return record.expires_at, delete_at, RECORD, json.dumps(asdict(record)), ALIVE, record.alive_until
