"""Quotas in each store: the five dimensions, no charge for refused requests, and two gateways that share Redis."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.valkey import Valkey
from penstock.core.config import QuotaSettings
from penstock.core.errors import RateLimited
from penstock.core.requests import Controls, InferRequest, SessionStep
from penstock.features.quotas.quota_check import QuotaCheck
from penstock.storage.limits.limit_store import LimitStore
from penstock.storage.limits.memory_limits import MemoryLimitStore
from penstock.storage.limits.redis_limits import RedisLimitStore
from penstock.telemetry.metrics import LimitMetrics

SLOW = {"reset_s": 31_536_000}  # a period that does not end while a test runs


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[list[LimitStore]]:
    """Return the stores of one gateway, or of two that share Redis."""
    made: list[LimitStore] = [MemoryLimitStore()]
    if request.param == "redis":
        url = request.getfixturevalue("valkey").url
        made = [RedisLimitStore(url, f"g-{n}", 5.0) for n in range(2)]
    for store in made:
        await store.start()
    yield made
    for store in made:
        await store.close()


def check_of(store: LimitStore, **quotas: float) -> QuotaCheck:
    settings = QuotaSettings.model_validate({**SLOW, **quotas})
    return QuotaCheck(store, settings, LimitMetrics(CollectorRegistry()))


async def outcome(check: QuotaCheck, session_id: str, block_id: str) -> str:
    request = InferRequest("m", [], controls=Controls(session=SessionStep(session_id) if session_id else None))
    try:
        await check.take(request, block_id)
    except RateLimited as error:
        return error.fields["limit"]
    return ""


async def test_totals_of_sessions_and_blocks_are_exact(stores: list[LimitStore]) -> None:
    checks = [check_of(store, requests_per_session_id=20, requests_per_block_id=50) for store in stores]
    asked = [(f"{id(stores)}-{n % 5}", f"blk-{id(stores)}-{n % 2}") for n in range(400)]
    found = await asyncio.gather(*(outcome(checks[n % len(checks)], *each) for n, each in enumerate(asked)))
    passed = [each for each, limit in zip(asked, found, strict=True) if not limit]
    by_session, by_block = Counter(s for s, _ in passed), Counter(b for _, b in passed)
    assert max(by_session.values()) <= 20
    assert max(by_block.values()) <= 50
    assert set(found) <= {"", "requests_per_session_id", "requests_per_block_id"}
    async with asyncio.timeout(20):
        while len(passed) < 100:  # charges that were undone are available again, to every gateway
            passed += [each for each in sorted(set(asked)) if not await outcome(checks[0], *each)]
            await asyncio.sleep(0.05)
    last = [limit for n in range(40) if not (limit := await outcome(checks[n % len(checks)], *asked[n]))]
    assert last == []


async def test_a_request_that_one_quota_refuses_is_charged_to_no_other(stores: list[LimitStore]) -> None:
    block_id = f"blk-alone-{id(stores)}"
    checks = [check_of(store, requests_per_session_id=3, requests_per_block_id=10) for store in stores]
    session = f"greedy-{id(stores)}"
    found = [await outcome(checks[n % len(checks)], session, block_id) for n in range(50)]
    assert found.count("") == 3
    await asyncio.sleep(0.05)  # refunds are sent without a wait
    others = [await outcome(checks[n % len(checks)], f"{session}-{n}", block_id) for n in range(20)]
    assert others.count("") == 7
    assert others[-1] == "requests_per_block_id"


@pytest.mark.parametrize(("name", "by_session"), [("total", False), ("per_session", True), ("per_block_id", False)])
async def test_quotas_per_second_refuse_what_exceeds_them(name: str, by_session: bool) -> None:
    now = 100.0
    check = check_of(MemoryLimitStore(lambda: now), **{f"requests_per_second_{name}": 10})
    assert [await outcome(check, "s", "b") for _ in range(12)] == [""] * 10 + [f"requests_per_second_{name}"] * 2
    assert (await outcome(check, "other", "b") == "") is by_session
    now += 0.1
    assert [bool(await outcome(check, "s", "b")) for _ in range(2)] == [False, True]


async def test_more_sessions_than_are_kept_exactly_keep_their_totals() -> None:
    store = MemoryLimitStore(max_keys=1000)
    check = check_of(store, requests_per_session_id=2)
    assert [await outcome(check, "mine", "b") for _ in range(3)] == ["", "", "requests_per_session_id"]
    for n in range(1500):
        await outcome(check, f"s{n}", "b")
    assert len(store._buckets) == 1000
    assert await outcome(check, "mine", "b") == "requests_per_session_id"
    again = [await outcome(check, f"s{n}", "b") for n in range(1000)]
    twice = [await outcome(check, f"s{n}", "b") for n in range(1000)]
    assert (again.count(""), twice.count("")) == (1000, 0)
