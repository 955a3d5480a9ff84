"""Behaviour that all cache stores share, and the choice of a store by URL."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.valkey import Valkey
from penstock.core.config import CacheSettings
from penstock.core.errors import ConfigError
from penstock.features.cache.stores.cache_store import CacheStore, open_store
from penstock.features.cache.stores.memory_cache import MemoryStore
from penstock.features.cache.stores.redis_cache import RedisStore
from penstock.features.cache.stores.sqlite_cache import SqliteStore


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CacheStore]:
    with contextlib.ExitStack() as stack:
        if request.param == "redis":
            url = stack.enter_context(Valkey(tmp_path / "valkey")).url
        else:
            url = {"memory": "memory://", "sqlite": "sqlite:///cache.db"}[request.param]
        opened = open_store(CacheSettings(url=url), "gateway-0", tmp_path, timeout_s=5.0)
        await opened.start()
        yield opened
        await opened.close()


async def test_a_stored_entry_is_returned(store: CacheStore) -> None:
    key, value = b"blk-1:\x00\xff*?[", bytes(range(256)) * 10
    assert await store.get(key) is None
    assert not await store.exists(key)
    await store.set(key, value, 60.0)
    assert await store.get(key) == value
    assert await store.exists(key)
    await store.set(key, b"", 60.0)
    assert await store.get(key) == b""


async def test_a_deleted_entry_is_gone(store: CacheStore) -> None:
    await store.set(b"a", b"1", 60.0)
    await store.set(b"b", b"2", 60.0)
    assert await store.delete(b"a")
    assert not await store.delete(b"a")
    assert (await store.get(b"a"), await store.get(b"b")) == (None, b"2")


async def test_entries_are_cleared_by_key_prefix(store: CacheStore) -> None:
    for key in (b"a*:1", b"a*:2", b"ab:1", b"a\\*:1"):
        await store.set(key, b"x", 60.0)
    assert await store.clear(b"a*:") == 2
    assert [await store.exists(key) for key in (b"a*:1", b"a*:2", b"ab:1", b"a\\*:1")] == [False, False, True, True]
    assert await store.clear() == 2
    assert await store.clear() == 0


async def test_many_entries_are_cleared_together(store: CacheStore) -> None:
    for number in range(3000):
        await store.set(b"x:%d" % number, b"1", 60.0)
    assert await store.clear(b"x:") == 3000


async def test_an_entry_expires(store: CacheStore) -> None:
    await store.set(b"short", b"1", 0.05)
    await store.set(b"long", b"2", 60.0)
    assert await store.get(b"long") == b"2"
    deadline = time.monotonic() + 20
    while await store.get(b"short") is not None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert not await store.exists(b"short")
    assert await store.exists(b"long")


async def test_memory_returns_entries_without_waiting() -> None:
    now = 0.0
    store = MemoryStore(10_000, lambda: now)
    await store.set(b"a", b"1", 10.0)
    assert store.get_now(b"a") == b"1"
    now = 10.0
    assert store.get_now(b"a") is None
    assert store.get_counts().evicted_by_ttl == 1


async def test_memory_stores_nothing_larger_than_itself() -> None:
    store = MemoryStore(2000)
    await store.set(b"a", b"1", 10.0)
    await store.set(b"a", bytes(3000), 10.0)
    assert store.get_now(b"a") is None
    assert store.get_counts().entries == 0


def test_a_url_selects_the_store(tmp_path: Path) -> None:
    def opened(url: str) -> CacheStore:
        return open_store(CacheSettings(url=url), "gateway-1", tmp_path)

    assert isinstance(opened("memory://"), MemoryStore)
    assert isinstance(opened("redis://:pass@host:1234/2"), RedisStore)
    assert isinstance(opened("unix:///run/redis.sock"), RedisStore)
    for url, file in (
        ("sqlite://", tmp_path / "cache-gateway-1.db"),
        ("sqlite:///answers.sqlite", tmp_path / "answers-gateway-1.sqlite"),
        ("sqlite:///sub/answers", tmp_path / "sub" / "answers-gateway-1"),
        ("sqlite:////var/cache.db", Path("/var/cache-gateway-1.db")),
    ):
        store = opened(url)
        assert isinstance(store, SqliteStore)
        assert store._file == file


@pytest.mark.parametrize(
    "url", ["", "memory", "memory://x", "sqlite://host/x", "sqlite:////", "http://h", "redis://h:x"]
)
def test_an_unknown_url_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="response_cache"):
        open_store(CacheSettings(url=url), "gateway-0", tmp_path)


def test_the_error_for_a_refused_url_hides_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(CacheSettings(url="mongodb://user:secret@host/0"), "gateway-0", tmp_path)
    assert "secret" not in str(caught.value)
