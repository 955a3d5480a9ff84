"""One suite for all stores of limits; a shared store counts for all gateways, which continue without it."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from benchmarks.valkey import Valkey
from benchmarks.waiting import until
from penstock.core.errors import ConfigError
from penstock.storage.limits import redis_limits as redis
from penstock.storage.limits.limit_store import CONCURRENCY, Charge, ChargeResult, LimitStore, Rate, Spend
from penstock.storage.limits.memory_limits import MemoryLimitStore
from penstock.storage.limits.redis_limits import RedisLimitStore, open_limit_store

# So slow that no tokens return while a test runs.
REQUESTS = Rate("requests", 0.001, 10_000.0)
ROWS = Rate("rows", 0.001, 20_000.0)
WAIT_S = 20.0


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[LimitStore]:
    if request.param == "memory":
        made: LimitStore = MemoryLimitStore()
    else:
        valkey: Valkey = request.getfixturevalue("valkey")
        made = RedisLimitStore(valkey.url, "g-0", 5.0)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def charge(key: str, *spends: tuple[Rate, float], **more: Any) -> Charge:
    return Charge(key, tuple(Spend(*spend) for spend in spends), **more)


async def take(store: LimitStore, asked: Charge) -> ChargeResult:
    taken = store.take_now(asked)
    return await store.take(asked) if taken is None else taken


async def limits_of(store: LimitStore, asked: Charge, times: int) -> list[str]:
    return [(await take(store, asked)).limit for _ in range(times)]


async def until_away(store: RedisLimitStore, is_away: bool) -> None:
    await until(lambda: store.is_away is is_away, "Redis is away, or back", WAIT_S)


async def test_a_burst_passes_and_further_requests_are_refused(store: LimitStore, key: str) -> None:
    one = charge(key, (REQUESTS, 1))
    assert await limits_of(store, one, 12) == [""] * 10 + ["requests"] * 2
    refused = await take(store, one)
    assert refused.retry_after_s == pytest.approx(1000, rel=0.05)
    assert refused.used_s[0] == pytest.approx(10_000, rel=0.05)


async def test_all_rates_are_charged_or_none(store: LimitStore, key: str) -> None:
    assert (await take(store, charge(key, (REQUESTS, 1), (ROWS, 15)))).limit == ""
    refused = await take(store, charge(key, (REQUESTS, 1), (ROWS, 10)))
    assert refused.limit == "rows"
    assert refused.retry_after_s == pytest.approx(5_000, rel=0.05)
    assert await limits_of(store, charge(key, (REQUESTS, 1)), 10) == [""] * 9 + ["requests"]


async def test_a_charge_larger_than_the_bucket_passes_if_the_bucket_is_full(store: LimitStore, key: str) -> None:
    assert await limits_of(store, charge(key, (ROWS, 100)), 2) == ["", "rows"]
    assert (await take(store, charge(key, (ROWS, 1)))).retry_after_s == pytest.approx(81_000, rel=0.05)


async def test_owed_tokens_are_charged_and_the_next_request_waits(store: LimitStore, key: str) -> None:
    assert (await take(store, charge(key, (ROWS, 0)))).limit == ""
    store.put(charge(key, (ROWS, 50), is_owed=True))
    refused = await take(store, charge(key, (REQUESTS, 1), (ROWS, 0)))
    assert refused.limit == "rows"
    assert refused.retry_after_s == pytest.approx(31_000, rel=0.05)


async def test_slots_are_held_and_released(store: LimitStore, key: str) -> None:
    assert (await take(store, charge(key, max_in_flight=1, in_flight=1))).limit == ""
    refused = await take(store, charge(key, max_in_flight=1, in_flight=2))
    assert refused.limit == CONCURRENCY
    assert refused.retry_after_s > 0
    store.put(charge(key, max_in_flight=1, in_flight=0, is_owed=True))
    assert (await take(store, charge(key, max_in_flight=1, in_flight=1))).limit == ""


async def test_concurrent_requests_get_no_more_than_the_limit(store: LimitStore, key: str) -> None:
    one = charge(key, (REQUESTS, 1), (ROWS, 1))
    taken = await asyncio.gather(*(take(store, one) for _ in range(500)))
    assert sum(not each.limit for each in taken) == 10


async def test_refilled_tokens_admit_requests(store: LimitStore, key: str) -> None:
    fast = charge(key, (Rate("requests", 100.0, 0.05), 1))
    passed = 0
    async with asyncio.timeout(WAIT_S):
        while passed < 20:
            taken = await take(store, fast)
            passed += not taken.limit
            await asyncio.sleep(taken.retry_after_s)


async def test_a_total_is_exact_and_ends_with_its_period(store: LimitStore, key: str) -> None:
    total = Rate("total", 7 / 31_536_000, 31_536_000, is_total=True)
    taken = await asyncio.gather(*(take(store, charge(key, (total, 1))) for _ in range(40)))
    assert sum(not each.limit for each in taken) == 7
    (refused,) = {each.retry_after_s // 60 for each in taken if each.limit}
    assert refused == pytest.approx((31_536_000 - time.time() % 31_536_000) // 60, abs=1)
    store.put(charge(key, (total, -1), is_owed=True))
    await take(store, charge(key, (REQUESTS, 1)))  # the charge has arrived
    assert await limits_of(store, charge(key, (total, 1)), 2) == ["", "total"]


async def test_a_new_period_admits_a_total_again(store: LimitStore, key: str) -> None:
    total = Rate("total", 3.0, 1, is_total=True)
    async with asyncio.timeout(WAIT_S):
        while not (refused := await take(store, charge(key, (total, 1)))).limit:
            pass
        assert 0 < refused.retry_after_s <= 1
        await asyncio.sleep(refused.retry_after_s + 0.01)
        assert (await take(store, charge(key, (total, 1)))).limit == ""


# --- shared stores


@pytest.fixture
async def two(valkey: Valkey) -> AsyncIterator[tuple[RedisLimitStore, RedisLimitStore]]:
    stores = RedisLimitStore(valkey.url, "g-0", 5.0), RedisLimitStore(valkey.url, "g-1", 5.0)
    for store in stores:
        store.set_gateways(2)
        await store.start()
    yield stores
    for store in stores:
        await store.close()


async def test_two_gateways_share_rates(two: tuple[RedisLimitStore, RedisLimitStore], key: str) -> None:
    one = charge(key, (REQUESTS, 1))
    taken = await asyncio.gather(*(take(two[n % 2], one) for n in range(100)))
    assert sum(not each.limit for each in taken) == 10


async def test_two_gateways_share_slots(two: tuple[RedisLimitStore, RedisLimitStore], key: str) -> None:
    assert (await take(two[0], charge(key, max_in_flight=3, in_flight=2))).limit == ""
    assert (await take(two[1], charge(key, max_in_flight=3, in_flight=1))).limit == ""
    assert (await take(two[1], charge(key, max_in_flight=3, in_flight=2))).limit == CONCURRENCY
    two[0].put(charge(key, max_in_flight=3, in_flight=1, is_owed=True))
    await take(two[0], charge(key, max_in_flight=3, in_flight=1))  # the charge has arrived
    assert (await take(two[1], charge(key, max_in_flight=3, in_flight=2))).limit == ""


async def test_slots_of_a_silent_gateway_are_released(
    two: tuple[RedisLimitStore, RedisLimitStore], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await take(two[0], charge(key, max_in_flight=1, in_flight=1))).limit == ""
    assert (await take(two[1], charge(key, max_in_flight=1, in_flight=1))).limit == CONCURRENCY
    monkeypatch.setattr(redis, "STALE_S", 0.001)
    await asyncio.sleep(0.01)
    assert (await take(two[1], charge(key, max_in_flight=1, in_flight=1))).limit == ""


async def test_a_certain_refusal_needs_no_call(two: tuple[RedisLimitStore, RedisLimitStore], key: str) -> None:
    one = charge(key, (REQUESTS, 1))
    assert two[0].take_now(one) is None
    await limits_of(two[0], one, 11)
    refused = two[0].take_now(one)
    assert refused is not None
    assert refused.limit == "requests"
    assert two[1].take_now(one) is None  # it has not been notified


async def test_when_redis_is_killed_each_gateway_keeps_its_share_and_nothing_is_granted_twice(
    tmp_path: Path, key: str
) -> None:
    one = charge(key, (REQUESTS, 1))
    with Valkey(tmp_path / "valkey") as valkey, capture_logs() as logs:
        store = RedisLimitStore(valkey.url, "g-0", 1.0)
        store.set_gateways(2)
        await store.start()
        assert await limits_of(store, one, 4) == [""] * 4
        valkey.kill()
        assert await limits_of(store, one, 5) == [""] * 3 + ["requests"] * 2  # six were left, three for each gateway
        assert store.is_away
        assert store.errors >= 1
        valkey.start()
        await until_away(store, False)
        assert await limits_of(store, one, 2) == ["requests"] * 2
        other = RedisLimitStore(valkey.url, "g-1", 5.0)
        await other.start()
        assert await limits_of(other, one, 2) == ["requests"] * 2  # learned from Redis
        await other.close()
        await store.close()
    assert [line["event"] for line in logs] == ["limits_not_shared", "limits_shared_again"]


async def test_a_hanging_redis_is_awaited_once(tmp_path: Path, key: str) -> None:
    one = charge(key, (REQUESTS, 1))
    with Valkey(tmp_path / "valkey") as valkey:
        store = RedisLimitStore(valkey.url, "g-0", 0.2)
        await store.start()
        assert await limits_of(store, one, 4) == [""] * 4
        valkey.freeze()
        taken = await asyncio.gather(*(take(store, one) for _ in range(50)))
        assert sum(not each.limit for each in taken) == 6
        assert store.take_now(charge("other", (REQUESTS, 1))) == ChargeResult((pytest.approx(1000.0),))  # type: ignore[arg-type]
        valkey.thaw()
        await until_away(store, False)
        assert store.take_now(charge("other", (REQUESTS, 1))) is None
        await store.close()


async def test_a_paused_process_does_not_report_redis_as_unavailable(tmp_path: Path, key: str) -> None:
    with Valkey(tmp_path / "valkey") as valkey:
        ticks = itertools.count(step=1000.0)
        store = RedisLimitStore(valkey.url, "g-0", 0.1, clock=lambda: next(ticks))
        await store.start()
        valkey.freeze()
        assert (await take(store, charge(key, (REQUESTS, 1)))).limit == ""
        assert not store.is_away
        valkey.thaw()
        await store.close()


async def test_a_bug_leaves_no_caller_waiting(valkey: Valkey, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisLimitStore(valkey.url, "g-0", 5.0)
    await store.start()
    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(store, "_on_answer", lambda *_: [][1])
        async with asyncio.timeout(WAIT_S):
            assert (await take(store, charge(key, (REQUESTS, 1)))).limit == ""
    assert [line["event"] for line in logs] == ["limits_not_shared", "background_loop_failed"]
    await until_away(store, False)
    await store.close()


async def test_without_redis_from_the_start_the_share_applies(key: str) -> None:
    store = RedisLimitStore("redis://127.0.0.1:1/0", "g-0", 1.0)
    await store.start()
    assert await limits_of(store, charge(key, (REQUESTS, 1)), 11) == [""] * 10 + ["requests"]
    await store.close()


async def test_callers_of_a_closing_store_do_not_wait(valkey: Valkey, key: str) -> None:
    store = RedisLimitStore(valkey.url, "g-0", 5.0)
    await store.start()
    waiting = [asyncio.create_task(store.take(charge(key, (REQUESTS, 1)))) for _ in range(5)]
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(WAIT_S):
        assert [task.limit for task in await asyncio.gather(*waiting)] == [""] * 5


@pytest.mark.parametrize("url", ["", "redis", "sqlite:///x", "memory://x", "redis:secret"])
def test_an_unknown_url_is_refused_without_printing_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_limit_store(url, "g-0")
    assert "secret" not in str(refused.value)
    assert "access.limits_url" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "name"), [("memory://", "memory"), ("redis://h:1/0", "redis"), ("rediss://h", "redis")]
)
def test_a_url_selects_the_store(url: str, name: str) -> None:
    assert open_limit_store(url, "g-0").name == name
