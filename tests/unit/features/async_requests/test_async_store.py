"""One suite for all stores of asynchronous requests: a file, which two gateways share, and a real Redis."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from benchmarks.valkey import Valkey
from benchmarks.waiting import until
from penstock.core.config import AsyncSettings
from penstock.core.errors import ConfigError, Overloaded, StoreUnavailable
from penstock.features.async_requests.async_records import AsyncRecord, AsyncState, StoredAnswer, make_finished_record
from penstock.features.async_requests.async_store import AsyncStore, open_async_store

NOW = 4_000_000_000.0  # Redis itself expires keys, so the test's clock is ahead of the real one
ANSWER = StoredAnswer(201, "text/plain", b"\x00answer")
MakeStore = Callable[..., AsyncStore]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as valkey:
        yield valkey.url


@pytest.fixture(params=["sqlite", "redis"])
async def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakeStore]:
    url = "sqlite:///" if request.param == "sqlite" else request.getfixturevalue("redis_url")
    made: list[AsyncStore] = []

    def make(**settings: int) -> AsyncStore:
        made.append(open_async_store(AsyncSettings(url=url, **settings), tmp_path))
        return made[-1]

    yield make
    for record_id in ("a", "b", "c"):
        await made[0].remove(record_id)
    for store in made:
        await store.close()


def record(request_id: str = "a", expires_at: float = NOW + 100) -> AsyncRecord:
    return AsyncRecord(request_id, "key", "/v1/infer", AsyncState.RUNNING, NOW, expires_at, NOW + 10)


async def test_a_record_is_seen_by_another_gateway(make_store: MakeStore) -> None:
    store, other = make_store(), make_store()
    await store.add(record(), NOW)
    assert await other.get("a", NOW) == record()
    assert await other.get("b", NOW) is None
    assert await other.get_answer("a") is None
    done = make_finished_record(record(), AsyncState.SUCCEEDED, ANSWER, NOW + 5, 60)
    await store.finish(done, ANSWER)
    assert (await other.get("a", NOW), await other.get_answer("a")) == (done, ANSWER)
    await other.remove("a")
    assert (await store.get("a", NOW), await store.get_answer("a")) == (None, None)


async def test_a_request_to_cancel_reaches_the_gateway_that_renews(make_store: MakeStore) -> None:
    store, other = make_store(), make_store()
    for request_id in ("a", "b"):
        await store.add(record(request_id), NOW)
    await other.ask_cancel("b")
    assert await store.renew(["a", "b"], NOW + 20) == ["b"]
    found = await other.get("a", NOW)
    assert found is not None
    assert (found.alive_until, found.is_cancel_asked) == (NOW + 20, False)


async def test_expired_records_are_deleted_and_make_room(make_store: MakeStore) -> None:
    store = make_store(max_requests=1)
    await store.add(record("a", NOW + 1), NOW)
    with pytest.raises(Overloaded, match="max_requests is 1"):
        await store.add(record("b"), NOW)
    assert await store.get("a", NOW + 2) is None
    await store.add(record("b"), NOW + 2)
    assert await store.get("a", NOW) is None


async def test_the_bounds_hold_while_gateways_store_at_once(make_store: MakeStore) -> None:
    stores = [make_store(max_requests=10, max_bytes=5000) for _ in range(2)]
    ids = [f"r{number}" for number in range(40)]
    adding = [stores[number % 2].add(record(each), NOW) for number, each in enumerate(ids)]
    added = [each for each, error in zip(ids, await gathered(*adding), strict=True) if error is None]
    assert len(added) == 10
    large = replace(ANSWER, body=bytes(1024))
    done = [make_finished_record(record(each), AsyncState.SUCCEEDED, large, NOW, 60) for each in added]
    errors = await gathered(*[stores[number % 2].finish(each, large) for number, each in enumerate(done)])
    assert [error is None for error in errors].count(True) == 4
    for each in added:
        await stores[0].remove(each)
    for each in added[:4]:
        await stores[1].add(record(each), NOW)
        await stores[1].finish(make_finished_record(record(each), AsyncState.SUCCEEDED, large, NOW, 60), large)
        await stores[1].remove(each)


async def gathered(*calls: Awaitable[None]) -> list[Overloaded | None]:
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(each is None or isinstance(each, Overloaded) for each in found), found
    return cast(list[Overloaded | None], found)


async def test_a_request_that_was_removed_is_not_stored_again(make_store: MakeStore) -> None:
    store, other = make_store(max_requests=1), make_store(max_requests=1)
    await store.add(record(), NOW)
    await other.remove("a")
    await store.finish(make_finished_record(record(), AsyncState.SUCCEEDED, ANSWER, NOW, 60), ANSWER)
    await other.ask_cancel("a")
    assert await store.renew(["a"], NOW + 20) == []
    assert (await other.get("a", NOW), await other.get_answer("a")) == (None, None)
    await other.add(record("b"), NOW)
    assert await other.get("b", NOW) == record("b")


async def test_answers_are_bounded_together(make_store: MakeStore) -> None:
    store = make_store(max_bytes=1024)
    large = replace(ANSWER, body=bytes(1000))
    for request_id in ("a", "b"):
        await store.add(record(request_id), NOW)
    await store.finish(make_finished_record(record(), AsyncState.SUCCEEDED, large, NOW, 60), large)
    with pytest.raises(Overloaded, match="max_bytes 1024"):
        await store.finish(make_finished_record(record("b"), AsyncState.SUCCEEDED, large, NOW, 60), large)
    error = StoredAnswer(503, "text/plain", bytes(100))
    await store.finish(make_finished_record(record("b"), AsyncState.FAILED, error, NOW, 60), error)
    assert await store.get_answer("b") == error
    with pytest.raises(Overloaded):
        await store.add(record("c"), NOW)
    await store.remove("a")
    await store.finish(make_finished_record(record("b"), AsyncState.SUCCEEDED, large, NOW, 60), large)


async def test_a_file_that_is_no_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "async-requests.db").write_bytes(b"no database" * 1000)
    store = open_async_store(AsyncSettings(), tmp_path)
    before = threading.active_count()
    with pytest.raises(StoreUnavailable, match="async-requests"):
        await store.get("a", NOW)
    await until(lambda: threading.active_count() <= before, "no thread keeps the process from ending")


async def test_a_redis_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    store = open_async_store(AsyncSettings(url="redis://127.0.0.1:1/0"), tmp_path)
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(store.get("a", NOW), 30)
    await store.close()


def test_other_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="async_requests"):
        open_async_store(AsyncSettings(url="memory://"), tmp_path)


def test_a_running_request_without_a_live_gateway_is_lost() -> None:
    assert record().seen_at(NOW + 10).state is AsyncState.RUNNING
    assert record().seen_at(NOW + 11).state is AsyncState.LOST
    assert record().document()["result"] is None
    done = make_finished_record(record(), AsyncState.FAILED, ANSWER, NOW, 60)
    assert done.seen_at(NOW + 11) is done
    assert done.document()["result"] == "/v1/requests/a/result"
