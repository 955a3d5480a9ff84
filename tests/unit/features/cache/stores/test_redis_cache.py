"""A cache in Redis: gateways share answers, and continue while Redis is away."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks.valkey import Valkey
from penstock.core.errors import Unavailable
from penstock.features.cache.stores.redis_cache import RedisStore
from penstock.storage.outage import RETRY_S


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(valkey: Valkey, clock: Clock) -> AsyncIterator[RedisStore]:
    opened = RedisStore(valkey.url, timeout_s=5.0, clock=clock)
    await opened.start()
    yield opened
    await opened.close()


async def test_entries_are_shared_between_gateways(valkey: Valkey, store: RedisStore) -> None:
    other = RedisStore(valkey.url, timeout_s=5.0)
    await other.start()
    await store.set(b"a", b"1", 60.0)
    assert await other.get(b"a") == b"1"
    assert await other.delete(b"a")
    assert await store.get(b"a") is None
    await other.close()


async def test_keys_of_other_applications_are_not_cleared(store: RedisStore) -> None:
    await store._call("SET", "penstock:other", "1")
    await store.set(b"a", b"1", 60.0)
    assert await store.clear() == 1
    assert await store._call("GET", "penstock:other") == b"1"


async def test_a_killed_server_is_logged_once_and_reconnected(valkey: Valkey, store: RedisStore, clock: Clock) -> None:
    await store.set(b"a", b"1", 60.0)
    valkey.kill()
    with capture_logs() as logs:
        for _ in range(3):
            assert await store.get(b"a") is None
            await store.set(b"a", b"2", 60.0)
            clock.now += RETRY_S
        with pytest.raises(Unavailable, match="does not answer"):
            await store.clear()
        assert store.get_counts().errors == 7
        valkey.start()
        assert await store.get(b"a") is None  # not tried yet
        assert store.get_counts().errors == 8
        clock.now += RETRY_S
        await store.set(b"a", b"3", 60.0)
        assert await store.get(b"a") == b"3"
    assert [entry["event"] for entry in logs] == ["cache_unavailable", "cache_recovered"]
    assert store.get_counts().errors == 8


async def test_a_hanging_server_costs_its_timeout_once(valkey: Valkey, clock: Clock) -> None:
    store = RedisStore(valkey.url, timeout_s=0.05, clock=clock)
    await store.start()
    await store.set(b"a", b"1", 60.0)
    valkey.freeze()
    with capture_logs() as logs:
        assert await store.get(b"a") is None
        for _ in range(1000):
            assert await store.get(b"a") is None  # 50 s if each call waited
    assert [entry["event"] for entry in logs] == ["cache_unavailable"]
    valkey.thaw()
    await store.close()


async def test_a_server_that_is_missing_at_the_start_is_found_later(tmp_path: Path, clock: Clock) -> None:
    valkey = Valkey(tmp_path / "valkey")
    store = RedisStore(valkey.url, timeout_s=5.0, clock=clock)
    await store.start()
    assert await store.get(b"a") is None
    with valkey:
        clock.now += RETRY_S
        await store.set(b"a", b"1", 60.0)
        assert await store.get(b"a") == b"1"
        await store.close()


async def test_a_full_server_refuses_writes_but_counts_as_available(tmp_path: Path) -> None:
    with Valkey(tmp_path / "valkey") as valkey:
        store = RedisStore(valkey.url, timeout_s=5.0)
        await store.start()
        await store.set(b"a", b"1", 60.0)
        await store._call("CONFIG", "SET", "maxmemory", "1")
        with capture_logs() as logs:
            await store.set(b"b", b"2", 60.0)
            await store.set(b"c", b"3", 60.0)
            assert await store.get(b"a") == b"1"
        assert [entry["event"] for entry in logs] == ["cache_refused"]
        assert store.get_counts().errors == 2
        await store.close()


async def test_the_password_is_sent_and_not_logged(tmp_path: Path) -> None:
    with Valkey(tmp_path / "valkey", "--requirepass", "s3cret") as valkey:
        url = valkey.url.replace("redis://", "redis://:s3cret@")
        store = RedisStore(url, timeout_s=5.0)
        await store.start()
        await store.set(b"a", b"1", 60.0)
        assert await store.get(b"a") == b"1"
        await store.close()
        wrong = RedisStore(url.replace("s3cret", "gue55"), timeout_s=5.0)
        await wrong.start()
        with capture_logs() as logs:
            assert await wrong.get(b"a") is None
        assert [entry["event"] for entry in logs] == ["cache_unavailable"]
        assert "gue55" not in str(logs)
        await wrong.close()


async def test_a_long_time_to_live_is_accepted(store: RedisStore) -> None:
    await store.set(b"a", b"1", float("inf"))
    assert await store.get(b"a") == b"1"
