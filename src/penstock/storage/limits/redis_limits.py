"""Limits that all gateways share in Redis: one hash per caller, changed atomically by one script.

Charges that arrive during a call are sent together in the next call. All times are by Redis' clock. The gateway also
records Redis' last answer for each caller: a charge that this answer certainly refuses needs no call, and while Redis
is unavailable, the gateway continues from the answer with its share of each limit. When Redis is available again, the
gateway sends the charges that it took meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import structlog

from penstock.storage.limits.buckets import SLOT_RETRY_S
from penstock.storage.limits.limit_store import CONCURRENCY, Charge, ChargeResult, LimitStore
from penstock.storage.limits.memory_limits import MemoryLimitStore
from penstock.storage.outage import RETRY_S
from penstock.storage.redis_link import find_store_kind, open_redis
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
NAMESPACE = "penstock:limits:"
SETTING = "access.limits_url"
CONNECTIONS = 2
# Timeout of one call: a hundred times the time that Redis takes in a data center, but hardly noticeable for a caller.
CALL_S = 0.25
MAX_BATCH = 128  # charges in one call
MAX_WAITING = 8192
PUT_DELAY_S = 0.01  # longest delay of a charge without a waiting caller
STALL_FACTOR = 2.0  # if a call failed after more than this many timeouts, this process was paused, not Redis
STALE_S = 10.0  # reports of requests in flight expire after this time
EPOCH_S = 1_700_000_000  # in November 2023; times of the script count from it, so that a double keeps fractions of 1 µs
# Fields of a caller's hash: under a rate's name, its bucket's value as in Buckets; under `@` and a gateway's name, how
# many requests it has in flight and when it reported so.
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
        local many, at = string.match(found[i + 1], '(%d+) (.+)')
        if now - tonumber(at) < stale then inside = inside + tonumber(many) else redis.call('HDEL', key, found[i]) end
      end
    end
    if inside > slots then limit = 'concurrency' end
  end
  local names, points, costs, starts = {}, {}, {}, {}
  for i = 1, count do
    local name, cost, need, burst, floor, is_total = argument(), number(), number(), number(), number(), argument()
    local unused = now
    if is_total == '1' then unused = (math.floor(clock[1] / burst) + 1) * burst - 1700000000 end
    local kept = tonumber(redis.call('HGET', key, name) or '')
    local point = kept or unused + floor
    if is_ahead then point = math.max(point, unused + floor) end
    point = math.max(point, unused)
    local missing = point + need - burst - unused
    if missing > 1e-9 and is_total == '1' then missing = unused - now end
    if not is_owed and missing > wait and missing > 1e-9 then limit, wait = name, missing end
    names[i], points[i], costs[i], starts[i] = name, point, cost, unused
  end
  local answer = {limit, string.format('%.9f', wait)}
  for i = 1, count do
    if limit == '' then points[i] = points[i] + costs[i] end
    if limit == '' or is_ahead then
      redis.call('HSET', key, names[i], string.format('%.9f', points[i]))
      ends = math.max(ends, points[i] - now)
    end
    answer[i + 2] = string.format('%.9f', points[i] - starts[i])
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
  answers[index] = table.concat(answer, ' ')
end
answers[#KEYS + 1] = string.format('%.6f', now)
return answers
"""


class _Waiting(NamedTuple):
    charge: Charge
    answer: asyncio.Future[ChargeResult | None] | None  # None: no caller waits; a result of None: Redis did not answer


class RedisLimitStore(MemoryLimitStore):
    """A LimitStore in Redis, which falls back to this process's memory while Redis is unavailable."""

    name = "redis"

    def __init__(
        self, url: str, gateway_id: str, timeout_s: float = CALL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a store that is not started. `gateway_id` must be unique to this process, also after a restart."""
        super().__init__(clock)
        self._timeout_s = timeout_s
        self._gateway_id = gateway_id
        self._link = open_redis(url, SETTING, timeout_s, CONNECTIONS)
        self._waiting: deque[_Waiting] = deque()
        self._has_waiting = asyncio.Event()
        self._tasks = BackgroundTasks("limits")
        self._is_open = False

    async def start(self) -> None:
        take: Callable[..., Awaitable[list[bytes]]] = self._link.client.register_script(_TAKE)
        self._tasks.supervise("limits", partial(self._call_next, take), deadline_s=None)
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        await self._tasks.close()
        self._answer_locally([])
        await self._link.close()

    def take_now(self, charge: Charge) -> ChargeResult | None:
        if self.is_away or not self._is_open:
            return self._take(charge)
        return self._buckets.find_certain_refusal(charge, self._clock())

    async def take(self, charge: Charge) -> ChargeResult:
        if len(self._waiting) < MAX_WAITING:
            answer: asyncio.Future[ChargeResult | None] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(charge, answer))
            self._has_waiting.set()
            taken = await answer
            if taken is not None:
                return taken
        self.errors += 1
        return self._take(charge)

    def find_refusal(self, charge: Charge) -> ChargeResult | None:
        return (
            super().find_refusal(charge) if self.is_away else self._buckets.find_certain_refusal(charge, self._clock())
        )

    def put(self, charge: Charge) -> None:
        if self.is_away or not self._is_open or len(self._waiting) >= MAX_WAITING:
            super().put(charge)
            return
        if not self._waiting:
            # An earlier call may send the charge before.
            asyncio.get_running_loop().call_later(PUT_DELAY_S, self._has_waiting.set)
        self._waiting.append(_Waiting(charge, None))

    async def _call_next(self, take: Callable[..., Awaitable[list[bytes]]]) -> None:
        """Wait for charges and send them in one call."""
        if self.is_away:
            await asyncio.sleep(RETRY_S)  # after that, an empty call checks whether Redis is available
        else:
            await self._has_waiting.wait()
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        if not self._waiting:
            self._has_waiting.clear()
        if not batch and not self.is_away:
            return  # the charges went with an earlier call
        try:
            await self._call(take, batch)
        except asyncio.CancelledError:
            self._answer_locally(batch)
            raise
        except self._link.faults as error:
            self._on_failure(batch, error)
        except Exception as error:
            self._on_failure(batch, error)  # waiting callers must get an answer after any error
            raise

    async def _call(self, take: Callable[..., Awaitable[list[bytes]]], batch: list[_Waiting]) -> None:
        sent = self._clock()
        keys = [NAMESPACE + waiting.charge.key for waiting in batch]
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await take(keys=keys, args=self._encode_arguments(batch))
        except self._link.faults:
            if self._clock() - sent < STALL_FACTOR * self._timeout_s:
                raise
            self._answer_locally(batch)  # this process was paused; Redis is not at fault
            return
        if self.is_away:
            self.is_away = False
            log.info("limits_shared_again", place=self._link.address)
        *answers, redis_now = answers
        self._buckets.ahead_s = EPOCH_S + float(redis_now) - sent  # periods of totals begin by the clock of Redis
        for waiting, encoded in zip(batch, answers, strict=True):
            self._on_answer(waiting, encoded, sent)

    def _encode_arguments(self, batch: list[_Waiting]) -> list[str | float]:
        found: list[str | float] = [self._gateway_id, STALE_S]
        for charge, _ in batch:
            is_ahead, floors = self._buckets.compute_minimum_use(charge, self._clock())
            found += [int(charge.is_owed), int(is_ahead), charge.max_in_flight, charge.in_flight, len(charge.spends)]
            for spend, floor_s in zip(charge.spends, floors, strict=True):
                rate = spend.rate
                found += [rate.name, spend.cost_s, spend.compute_need_s(), rate.burst_s, floor_s, int(rate.is_total)]
        return found

    def _on_answer(self, waiting: _Waiting, encoded: bytes, sent: float) -> None:
        """Record Redis' answer and pass it to the caller.

        Times count from when the call was sent, so that no bucket appears to be full later than it is in Redis.
        """
        limit, wait_s, *used_s = encoded.decode().split(" ")
        is_slot = limit == CONCURRENCY and not float(wait_s)
        taken = ChargeResult(tuple(map(float, used_s)), limit, SLOT_RETRY_S if is_slot else float(wait_s))
        if waiting.charge.spends:
            self._buckets.set_use(waiting.charge, taken, sent)
        if waiting.answer is not None and not waiting.answer.done():
            waiting.answer.set_result(taken)

    def _on_failure(self, batch: list[_Waiting], error: Exception) -> None:
        if not self.is_away:
            self.is_away = True
            log.warning(
                "limits_not_shared",
                place=self._link.address,
                error=str(error) or type(error).__name__,
                meaning="each gateway enforces its own share of every limit until Redis is available again",
            )
        self._answer_locally(batch)

    def _answer_locally(self, batch: list[_Waiting]) -> None:
        """Answer the charges of this batch, and all waiting charges, from this process's own buckets."""
        for charge, answer in (*batch, *self._waiting):
            if answer is None:
                super().put(charge)
            elif not answer.done():
                answer.set_result(None)
        self._waiting.clear()
        self._has_waiting.clear()


def open_limit_store(url: str, gateway_id: str) -> LimitStore:
    """Create the configured store without starting it. Raise ConfigError if the URL's scheme is not supported."""
    if find_store_kind(url, SETTING, "memory", "redis") == "memory":
        return MemoryLimitStore()
    return RedisLimitStore(url, gateway_id)
