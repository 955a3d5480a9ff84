"""The limits of keys, of the server and of addresses, and log events of a shared store."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.blocks import BlockDescription
from penstock.core.config import AccessSettings, KeyLimitSettings
from penstock.core.errors import RateLimited
from penstock.core.principals import ANYBODY, KeyLimits, Principal
from penstock.core.requests import InferRequest
from penstock.core.settings import BlockSettings
from penstock.features.limits.meter import REPORT_S, Meter
from penstock.storage.limits.limit_store import Charge, ChargeResult
from penstock.storage.limits.memory_limits import MemoryLimitStore
from penstock.telemetry.metrics import LimitMetrics

BLOCK = BlockDescription("blk-a", "a", "1", "", "", (), (), 8, 1, BlockSettings())


def request(principal: Principal = ANYBODY, client: str = "10.0.0.1") -> InferRequest:
    return InferRequest("a", [], principal=principal, client=client)


def meter_of(store: Any = None, **settings: Any) -> Meter:
    registry = CollectorRegistry()
    return Meter(store or MemoryLimitStore(lambda: 0.0), AccessSettings(**settings), LimitMetrics(registry))


async def passed(meter: Meter, asked: InferRequest, times: int = 10) -> int:
    count = 0
    for _ in range(times):
        try:
            await meter.take(asked, BLOCK)
            count += 1
        except RateLimited:
            pass
    return count


async def test_without_limits_nothing_is_counted() -> None:
    meter = meter_of()
    assert not meter.has_defaults
    assert await meter.take(request(Principal("k", "k-1", limits=KeyLimits())), BLOCK) is None


async def test_a_key_without_its_own_limits_has_the_servers() -> None:
    meter = meter_of(key_limits=KeyLimitSettings(requests_per_s=3))
    assert meter.has_defaults
    assert await passed(meter, request(Principal("k", "k-1"))) == 3
    assert await passed(meter, request(Principal("l", "l-1", limits=KeyLimits()))) == 3
    assert await passed(meter, request(Principal("m", "m-1", limits=KeyLimits(requests_per_s=5)))) == 5
    assert await passed(meter, request()) == 10


async def test_callers_without_a_key_are_limited_by_address() -> None:
    meter = meter_of(anonymous_limits=KeyLimitSettings(requests_per_s=3))
    assert await passed(meter, request(client="10.0.0.1")) == 3
    assert await passed(meter, request(client="10.0.0.2")) == 3
    assert await passed(meter, request(Principal("k", "k-1"))) == 10


async def test_a_certain_refusal_is_raised_early_and_charges_nothing() -> None:
    meter = meter_of(key_limits=KeyLimitSettings(requests_per_s=2, rows_per_s=5, concurrency=2))
    key = Principal("k", "k-1")
    meter.check(ANYBODY, "10.0.0.1")
    for _ in range(5):
        meter.check(key, "")
    assert await passed(meter, request(key), 2) == 2
    with pytest.raises(RateLimited) as refused:
        meter.check(key, "")
    assert refused.value.fields["limit"] == "requests"
    meter = meter_of(key_limits=KeyLimitSettings(concurrency=1))
    inside = await meter.take(request(key), BLOCK)
    assert inside is not None
    with pytest.raises(RateLimited, match="the key 'k' has 1 requests in flight"):
        meter.check(key, "")
    inside.end()
    meter.check(key, "")


async def test_each_of_several_gateways_has_its_share() -> None:
    meter = meter_of(anonymous_limits=KeyLimitSettings(requests_per_s=8))
    assert meter.get_status() == {"store": "memory", "away": False, "share": 1.0}
    meter.gateways_changed(4)
    assert await passed(meter, request()) == 2
    assert meter.get_status()["share"] == 0.25
    meter.gateways_changed(0)
    assert meter.get_status()["share"] == 1.0


class SharedStore:
    """A shared store that answers when the test allows it, and records its calls."""

    name = "redis"
    is_away = False
    errors = 0

    def __init__(self) -> None:
        self.told: list[Charge] = []
        self.gate = asyncio.Event()

    def take_now(self, charge: Charge) -> ChargeResult | None:
        return None

    async def take(self, charge: Charge) -> ChargeResult:
        await self.gate.wait()
        return ChargeResult((), "" if charge.in_flight <= charge.max_in_flight else "concurrency", 0.1)

    def put(self, charge: Charge) -> None:
        self.told.append(charge)

    def set_gateways(self, count: int) -> None: ...


async def test_a_shared_store_is_notified_of_ended_requests_and_reminded_of_running_ones() -> None:
    store = SharedStore()
    meter = meter_of(store)
    key = Principal("k", "k-1", limits=KeyLimits(concurrency=2))
    store.gate.set()
    one, two = await meter.take(request(key), BLOCK), await meter.take(request(key), BLOCK)
    assert one is not None
    assert two is not None
    with pytest.raises(RateLimited):
        await meter.take(request(key), BLOCK)
    assert [(charge.key, charge.in_flight, charge.is_owed) for charge in store.told] == [("key:k-1", 2, True)]
    meter.tick(100.0)
    meter.tick(100.0 + REPORT_S / 2)
    assert [charge.in_flight for charge in store.told] == [2, 2]
    meter.tick(100.0 + REPORT_S)
    one.end()
    two.end()
    assert [charge.in_flight for charge in store.told] == [2, 2, 2, 1, 0]


async def test_a_caller_that_leaves_during_the_stores_answer_holds_no_slot() -> None:
    store = SharedStore()
    meter = meter_of(store)
    key = Principal("k", "k-1", limits=KeyLimits(concurrency=1))
    waiting = asyncio.create_task(meter.take(request(key), BLOCK))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [charge.in_flight for charge in store.told] == [0]
    store.gate.set()
    assert await meter.take(request(key), BLOCK) is not None


async def test_an_unreachable_store_is_logged() -> None:
    store, registry = SharedStore(), CollectorRegistry()
    meter = Meter(store, AccessSettings(), LimitMetrics(registry))  # type: ignore[arg-type]
    meter.gateways_changed(2)
    assert meter.get_status() == {"store": "redis", "away": False, "share": 1.0}
    store.is_away, store.errors = True, 7
    meter.tick(0.0)
    assert meter.get_status() == {"store": "redis", "away": True, "share": 0.5}
    assert registry.get_sample_value("penstock_limits_away") == 1
    assert registry.get_sample_value("penstock_limits_errors_total") == 7
