"""Limits that all gateways share in Redis: a hash for each caller, changed by one script for all of its dimensions.

What comes while a call is on its way goes with the next one, together. Redis' own clock is everybody's. What it said
last is kept here: a refusal that is certain by it needs no call, and while Redis is away this gateway goes on from
there with its share of each limit, of which Redis hears when it is back.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import structlog

from penstock.storage.limits.base import CONCURRENCY, Ask, LimitStore, Taken
from penstock.storage.limits.buckets import SOON_S
from penstock.storage.limits.memory import MemoryLimitStore
from penstock.storage.outage import RETRY_S
from penstock.storage.redis_link import open_redis, store_kind

log = structlog.get_logger()
NAMESPACE = "penstock:limits:"
SETTING = "access.limits_url"
CONNECTIONS = 2
AT_ONCE = 128  # asks in one call
MAX_WAITING = 8192
JOINED_S = 0.01  # what nobody waits for may be so late
STALLED = 2.0  # times its timeout, that a call took to fail
STALE_S = 10.0  # a gateway that says nothing for so long holds nothing
# Of a caller's hash: under a rate's name, until when it is used; under `@` and a gateway's name, how many it holds and
# when it said so. Times are in seconds since 2023: what a double has left for fractions is then well below 1 µs.
_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] - 1700000000 + clock[2] / 1000000
local me, stale, at = '@' .. ARGV[1], tonumber(ARGV[2]), 2
local function argument() at = at + 1; return ARGV[at] end
local function number() return tonumber(argument()) end
local answers = {}
for index, key in ipairs(KEYS) do
  local is_owed, is_ahead, slots, held, count = argument() == '1', argument() == '1', number(), number(), number()
  local limit, wait, ends = '', 0, 0
  if slots > 0 and not is_owed then
    local inside, found = held, redis.call('HGETALL', key)
    for i = 1, #found, 2 do
      if string.sub(found[i], 1, 1) == '@' and found[i] ~= me then
        local many, said = string.match(found[i + 1], '(%d+) (.+)')
        if now - tonumber(said) < stale then inside = inside + tonumber(many) else redis.call('HDEL', key, found[i]) end
      end
    end
    if inside > slots then limit = 'concurrency' end
  end
  local names, points, costs = {}, {}, {}
  for i = 1, count do
    local name, cost, need, burst, floor = argument(), number(), number(), number(), number()
    local kept = tonumber(redis.call('HGET', key, name) or '')
    local point = kept or now + floor
    if is_ahead then point = math.max(point, now + floor) end
    point = math.max(point, now)
    local missing = point + need - burst - now
    if not is_owed and missing > wait and missing > 1e-9 then limit, wait = name, missing end
    names[i], points[i], costs[i] = name, point, cost
  end
  local said = {limit, string.format('%.9f', wait)}
  for i = 1, count do
    if limit == '' then points[i] = points[i] + costs[i] end
    if limit == '' or is_ahead then
      redis.call('HSET', key, names[i], string.format('%.9f', points[i]))
      ends = math.max(ends, points[i] - now)
    end
    said[i + 2] = string.format('%.9f', points[i] - now)
  end
  if slots > 0 and limit == '' then
    if held > 0 then
      redis.call('HSET', key, me, held .. ' ' .. string.format('%.3f', now))
      ends = math.max(ends, stale)
    else redis.call('HDEL', key, me) end
  end
  if ends > 0 then
    local ms = math.ceil(ends * 1000) + 1000
    if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
  end
  answers[index] = table.concat(said, ' ')
end
return answers
"""


class _Waiting(NamedTuple):
    ask: Ask
    answer: asyncio.Future[Taken | None] | None  # None: nobody waits; and of it: the store did not answer


class RedisLimitStore(MemoryLimitStore):
    """While Redis is away it is as one of this process alone."""

    name = "redis"

    def __init__(
        self, url: str, timeout_s: float, gateway_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`gateway_id` is this process's alone: one that is started again is another."""
        super().__init__(clock)
        self._timeout_s = timeout_s
        self._gateway_id = gateway_id
        self._link = open_redis(url, SETTING, timeout_s, CONNECTIONS)
        self._waiting: deque[_Waiting] = deque()
        self._has_some = asyncio.Event()
        self._caller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._caller = asyncio.create_task(self._call_forever(), name="limits")

    async def close(self) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.cancel()
            with suppress(asyncio.CancelledError):
                await caller
        self._give_up([])
        await self._link.close()

    def take_now(self, ask: Ask) -> Taken | None:
        if self.is_away or self._caller is None:
            return self._take(ask)
        return self._buckets.foresee(ask, self._clock())

    async def take(self, ask: Ask) -> Taken:
        if len(self._waiting) < MAX_WAITING:
            answer: asyncio.Future[Taken | None] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(ask, answer))
            self._has_some.set()
            taken = await answer
            if taken is not None:
                return taken
        self.errors += 1
        return self._take(ask)

    def refusal(self, ask: Ask) -> Taken | None:
        return super().refusal(ask) if self.is_away else self._buckets.foresee(ask, self._clock())

    def put(self, ask: Ask) -> None:
        if self.is_away or self._caller is None or len(self._waiting) >= MAX_WAITING:
            super().put(ask)
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(JOINED_S, self._has_some.set)  # unless an ask takes it along
        self._waiting.append(_Waiting(ask, None))

    async def _call_forever(self) -> None:
        take: Callable[..., Awaitable[list[bytes]]] = self._link.client.register_script(_TAKE)
        while True:
            if self.is_away:
                await asyncio.sleep(RETRY_S)  # then a call without asks tells whether it is back
            else:
                await self._has_some.wait()
            batch = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            if not self._waiting:
                self._has_some.clear()
            if not batch and not self.is_away:
                continue  # what was there went along with an ask
            try:
                await self._call(take, batch)
            except asyncio.CancelledError:
                self._give_up(batch)
                raise
            except self._link.faults as error:
                self._failed(batch, error)
            except Exception as error:  # whoever waits must be told, whatever it was
                log.exception("bug", where="limits")
                self._failed(batch, error)

    async def _call(self, take: Callable[..., Awaitable[list[bytes]]], batch: list[_Waiting]) -> None:
        sent = self._clock()
        keys = [NAMESPACE + waiting.ask.key for waiting in batch]
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await take(keys=keys, args=self._arguments(batch))
        except self._link.faults:
            if self._clock() - sent < STALLED * self._timeout_s:
                raise
            self._give_up(batch)  # it was this process that stood still, and not Redis
            return
        if self.is_away:
            self.is_away = False
            log.info("limits_shared_again", place=self._link.place)
        for waiting, said in zip(batch, answers, strict=True):
            self._heard(waiting, said, sent)

    def _arguments(self, batch: list[_Waiting]) -> list[str | float]:
        found: list[str | float] = [self._gateway_id, STALE_S]
        for ask, _ in batch:
            is_ahead, floors = self._buckets.floors(ask, self._clock())
            found += [int(ask.is_owed), int(is_ahead), ask.slots, ask.held, len(ask.spends)]
            for spend, floor_s in zip(ask.spends, floors, strict=True):
                found += [spend.rate.name, spend.cost_s, spend.need_s(), spend.rate.burst_s, floor_s]
        return found

    def _heard(self, waiting: _Waiting, said: bytes, sent: float) -> None:
        """What it says was so after it was sent: counted from then, it promises no later end than is true."""
        limit, wait_s, *used_s = said.decode().split(" ")
        is_slot = limit == CONCURRENCY and not float(wait_s)
        taken = Taken(tuple(map(float, used_s)), limit, SOON_S if is_slot else float(wait_s))
        if waiting.ask.spends:
            self._buckets.set(waiting.ask, taken, sent)
        if waiting.answer is not None and not waiting.answer.done():
            waiting.answer.set_result(taken)

    def _failed(self, batch: list[_Waiting], error: Exception) -> None:
        if not self.is_away:
            self.is_away = True
            log.warning(
                "limits_not_shared",
                place=self._link.place,
                error=str(error) or type(error).__name__,
                meaning="each gateway holds callers to its own share of their limits until Redis is back",
            )
        self._give_up(batch)

    def _give_up(self, batch: list[_Waiting]) -> None:
        """Those that were sent, and those that wait."""
        for ask, answer in (*batch, *self._waiting):
            if answer is None:
                super().put(ask)
            elif not answer.done():
                answer.set_result(None)
        self._waiting.clear()
        self._has_some.clear()


def open_limit_store(url: str, timeout_s: float, gateway_id: str) -> LimitStore:
    """Not started yet. Raises ConfigError for a URL that means no store."""
    if store_kind(url, SETTING, "memory", "redis") == "memory":
        return MemoryLimitStore()
    return RedisLimitStore(url, timeout_s, gateway_id)
