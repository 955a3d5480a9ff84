"""Session records in Redis: one hash per session, changed atomically by scripts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from penstock.core.config import SessionSettings
from penstock.core.errors import Unavailable
from penstock.features.sessions.session_store import StepRow, TakenSession
from penstock.storage.redis_link import find_store_kind, open_redis

log = structlog.get_logger()
NAMESPACE = "penstock:session:"
SETTING = "sessions.url"
CONNECTIONS = 64
TIMEOUT_S = 2.0  # of a call, longer than a failover inside Redis takes; after it, the request fails
# The fields of a hash: epoch, owner, life, next, begun (the unconfirmed step), state, and each answer by step number.
_TAKE = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local owner = redis.call('HGET', KEYS[1], 'owner') or ''
if owner ~= '' and owner ~= ARGV[1] and epoch ~= tonumber(ARGV[2]) then return {epoch, owner} end
redis.call('HSET', KEYS[1], 'epoch', epoch + 1, 'owner', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {epoch + 1, '', redis.call('HGETALL', KEYS[1])}
"""
_BEGIN = """
local row = redis.call('HMGET', KEYS[1], 'epoch', 'life', 'next')
if row[1] ~= ARGV[1] then return 0 end
if row[2] == ARGV[2] then
  if tonumber(row[3]) > tonumber(ARGV[3]) then return 0 end
else
  for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    if tonumber(name) then redis.call('HDEL', KEYS[1], name) end
  end
end
redis.call('HSET', KEYS[1], 'life', ARGV[2], 'next', ARGV[3], 'begun', ARGV[3], 'state', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
"""
_END = """
local row = redis.call('HMGET', KEYS[1], 'epoch', 'begun')
if row[1] ~= ARGV[1] or row[2] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'next', ARGV[3], 'begun', 0, 'state', ARGV[4])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], ARGV[2], ARGV[5]) end
redis.call('HDEL', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return 1
"""
_MOVE = """
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('RENAMENX', KEYS[1], KEYS[2]) == 0 then return 0 end
redis.call('HSET', KEYS[2], 'owner', '')
return 1
"""
_RELEASE = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('HSET', KEYS[1], 'owner', '') end
return 1
"""
SCRIPTS = (_TAKE, _MOVE, _BEGIN, _END, _RELEASE)


class RedisSessionStore:
    """A SessionStore in Redis."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._link = link = open_redis(url, SETTING, timeout_s, CONNECTIONS)
        self._scripts: dict[str, Callable[..., Awaitable[Any]]] = {
            script: link.client.register_script(script) for script in SCRIPTS
        }
        self._is_lost = False

    async def close(self) -> None:
        await self._link.close()

    async def take(self, key: str, owner: str, ttl_s: float, instead_of: int = 0) -> TakenSession:
        epoch, holder, *rows = await self._run(_TAKE, [key], owner, instead_of, _to_ms(ttl_s))
        if holder:
            return TakenSession(int(epoch), holder.decode())
        (row,) = rows
        found = dict(zip(row[::2], row[1::2], strict=True))
        answers = {int(name): value for name, value in found.items() if name.isdigit()}
        return TakenSession(int(epoch), "", found.get(b"state", b""), int(found.get(b"begun", 0)), answers)

    async def move(self, key: str, to: str) -> bool:
        return bool(await self._run(_MOVE, [key, to]))

    async def begin(self, key: str, step: StepRow, ttl_s: float) -> bool:
        return bool(await self._run(_BEGIN, [key], step.epoch, step.life, step.number, step.state, _to_ms(ttl_s)))

    async def end(self, key: str, step: StepRow, ttl_s: float) -> bool:
        old = step.number - step.answers
        arguments = (step.epoch, step.number, step.number + 1, step.state, step.answer, old, _to_ms(ttl_s))
        return bool(await self._run(_END, [key], *arguments))

    async def release(self, key: str, epoch: int) -> None:
        await self._run(_RELEASE, [key], epoch)

    async def _run(self, script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._scripts[script](keys=[NAMESPACE + key for key in keys], args=arguments)
        except self._link.faults as error:
            if not self._is_lost:
                log.warning(
                    "session_store_unavailable", place=self._link.address, error=str(error) or type(error).__name__
                )
            self._is_lost = True
            raise Unavailable(f"the session store at {self._link.address} does not answer; try again") from error
        if self._is_lost:
            log.info("session_store_recovered", place=self._link.address)
            self._is_lost = False
        return answer


def _to_ms(ttl_s: float) -> int:
    return max(1, int(ttl_s * 1000))


def open_session_store(settings: SessionSettings) -> RedisSessionStore | None:
    """Return the configured store, or None if each gateway stores its own sessions in memory.

    Raise ConfigError if the URL's scheme is not supported.
    """
    if find_store_kind(settings.url, SETTING, "memory", "redis") == "memory":
        return None
    return RedisSessionStore(settings.url)
