"""Every store of sessions gives a session to one owner at a time, and refuses writes of others."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from benchmarks.valkey import Valkey
from penstock.core.config import SessionSettings
from penstock.core.errors import ConfigError, Unavailable
from penstock.features.sessions.redis_sessions import RedisSessionStore, open_session_store
from penstock.features.sessions.session_store import SessionStore, StepRow
from tests.unit.features.sessions.memory_store import MemorySessionStore

TTL_S = 60.0
KEY = "blk-1:s"
LIFE = 2**61 + 1


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SessionStore]:
    made: SessionStore
    if request.param == "memory":
        made = MemorySessionStore()
    else:
        valkey: Valkey = request.getfixturevalue("valkey")
        made = RedisSessionStore(valkey.url, 5.0)
    yield made
    await made.close()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return f"{KEY}:{request.node.name}"


def row(epoch: int, number: int, answer: bytes = b"", life: int = LIFE) -> StepRow:
    return StepRow(epoch, life, number, f"state {number}".encode(), answer, 2)


async def play(store: SessionStore, key: str, epoch: int, *numbers: int, life: int = LIFE) -> None:
    for number in numbers:
        assert await store.begin(key, row(epoch, number, life=life), TTL_S)
        assert await store.end(key, row(epoch, number, f"a{number}".encode(), life), TTL_S)


async def test_records_of_one_owner_are_found_by_the_next(store: SessionStore, key: str) -> None:
    new = await store.take(key, "g-0", TTL_S)
    assert (new.epoch, new.holder, new.state, new.unconfirmed, new.answers) == (1, "", b"", 0, {})
    await play(store, key, 1, 1, 2, 3)
    assert await store.begin(key, row(1, 4), TTL_S)
    await store.release(key, 1)
    taken = await store.take(key, "g-1", TTL_S)
    assert (taken.epoch, taken.holder, taken.state, taken.unconfirmed) == (2, "", b"state 4", 4)
    assert taken.answers == {2: b"a2", 3: b"a3"}


async def test_a_session_with_an_owner_is_taken_only_by_naming_the_owner(store: SessionStore, key: str) -> None:
    await store.take(key, "g-0", TTL_S)
    held = await store.take(key, "g-1", TTL_S)
    assert (held.epoch, held.holder) == (1, "g-0")
    assert (await store.take(key, "g-0", TTL_S)).epoch == 2  # the same gateway, back again
    late = await store.take(key, "g-1", TTL_S, instead_of=1)
    assert (late.epoch, late.holder) == (2, "g-0")
    assert (await store.take(key, "g-1", TTL_S, instead_of=2)).epoch == 3


async def test_a_former_owner_cannot_write(store: SessionStore, key: str) -> None:
    await store.take(key, "g-0", TTL_S)
    assert await store.begin(key, row(1, 1), TTL_S)
    await store.take(key, "g-1", TTL_S, instead_of=1)
    assert not await store.end(key, row(1, 1, b"late"), TTL_S)
    assert not await store.begin(key, row(1, 2), TTL_S)
    await store.release(key, 1)
    assert (await store.take(key, "g-2", TTL_S)).holder == "g-1"
    await play(store, key, 2, 1)
    assert (await store.take(key, "g-1", TTL_S)).answers == {1: b"a1"}


async def test_no_step_starts_after_its_end_was_recorded(store: SessionStore, key: str) -> None:
    await store.take(key, "g-0", TTL_S)
    await play(store, key, 1, 1, 2)
    assert not await store.begin(key, row(1, 1), TTL_S)
    assert not await store.begin(key, row(1, 2), TTL_S)
    assert await store.begin(key, row(1, 3), TTL_S)
    assert await store.begin(key, row(1, 3), TTL_S)  # it failed, and is sent again
    assert not await store.end(key, row(1, 4, b"never begun"), TTL_S)


async def test_a_restarted_session_has_no_answers_from_before(store: SessionStore, key: str) -> None:
    await store.take(key, "g-0", TTL_S)
    await play(store, key, 1, 1, 2)
    await play(store, key, 1, 1, life=LIFE + 1)
    taken = await store.take(key, "g-0", TTL_S)
    assert (taken.state, taken.answers) == (b"state 1", {1: b"a1"})


async def test_a_record_can_be_moved_to_another_key(store: SessionStore, key: str) -> None:
    await store.take(key, "g-0", TTL_S)
    await play(store, key, 1, 1)
    assert await store.move(key, f"{key}-new")
    assert not await store.move(key, f"{key}-new")
    taken = await store.take(f"{key}-new", "g-1", TTL_S)
    assert (taken.epoch, taken.state, taken.answers) == (2, b"state 1", {1: b"a1"})
    await store.take(key, "g-0", TTL_S)
    assert not await store.move(key, f"{key}-new")  # the key exists


async def test_idle_records_expire(store: SessionStore, key: str) -> None:
    await store.take(key, "g-0", 0.02)
    await asyncio.sleep(0.1)
    assert (await store.take(key, "g-1", TTL_S)).epoch == 1
    assert not await store.begin(f"{key}-unknown", row(1, 1), TTL_S)


async def test_an_unreachable_store_is_reported(tmp_path: Path) -> None:
    with Valkey(tmp_path) as valkey:
        store = RedisSessionStore(valkey.url, 0.5)
        await store.take(KEY, "g-0", TTL_S)
        valkey.kill()
        with pytest.raises(Unavailable, match="does not answer"):
            await store.take(KEY, "g-0", TTL_S)
        valkey.start()
        assert (await store.take(KEY, "g-0", TTL_S)).epoch == 1  # the store had no disk
        await store.close()


def test_a_url_selects_the_store_or_is_refused() -> None:
    assert open_session_store(SessionSettings()) is None
    assert isinstance(open_session_store(SessionSettings(url="redis://h:1/0")), RedisSessionStore)
    for url in ("mongodb://x", "memory://x", "redis"):
        with pytest.raises(ConfigError, match=r"sessions\.url"):
            open_session_store(SessionSettings(url=url))
