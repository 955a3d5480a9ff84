"""Managers that share a metadata store: one leads, another takes over, and a former leader changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.core.cluster.manager_records import LEADER_KEY, MANAGERS_PREFIX, ManagerRecord
from penstock.core.errors import Conflict, NotLeader
from penstock.manager.leading.election import SOLE_LEASE_S, Election
from penstock.storage.metadata.metadata_store import Write
from penstock.storage.metadata.sqlite import SqliteMetadataStore

TTL_S = 1.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteMetadataStore]:
    opened = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    yield opened
    await opened.close()


class Candidate(Election):
    """A manager with a clock that can be stopped, as if its process were."""

    def __init__(self, store: SqliteMetadataStore, name: str, ttl_s: float = TTL_S) -> None:
        self.changes = 0
        self.ahead_s = 0.0
        loop = asyncio.get_running_loop()
        record = ManagerRecord(manager_id=name, address=f"{name}:1")
        super().__init__(store, record, ttl_s, lambda: loop.time() + self.ahead_s)

    def begin(self) -> None:
        self.start(self._count)

    def _count(self) -> None:
        self.changes += 1


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_one_manager_leads_and_another_takes_over(store: SqliteMetadataStore) -> None:
    first, second = Candidate(store, "first"), Candidate(store, "second")
    first.begin()
    await until(lambda: first.epoch)
    second.begin()
    await until(lambda: second.leader and second.managers.keys() == {"first", "second"})
    assert second.epoch == 0
    with pytest.raises(NotLeader, match="manager 'first' leads") as refused:
        _ = second.write_condition
    assert refused.value.fields == {"leader": "first:1"}
    old_epoch, old_guard = first.epoch, first.write_condition
    await store.commit([Write("a", b"1")], [old_guard])
    await first.close()
    assert first.epoch == 0
    with pytest.raises(NotLeader):
        _ = first.write_condition
    await until(lambda: second.epoch)
    assert second.epoch > old_epoch
    assert second.leader_epoch == second.epoch
    with pytest.raises(Conflict, match=LEADER_KEY):
        await store.commit([Write("a", b"2")], [old_guard])
    await store.commit([Write("a", b"2")], [second.write_condition])
    await until(lambda: second.managers.keys() == {"second"})
    await second.close()
    assert (await store.list(MANAGERS_PREFIX)).records == ()


async def test_a_stopped_leader_loses_its_term_and_returns_as_a_follower(store: SqliteMetadataStore) -> None:
    first, second = Candidate(store, "first"), Candidate(store, "second")
    first.begin()
    await until(lambda: first.epoch)
    second.begin()
    await until(lambda: second.leader)
    old_epoch = first.epoch
    first.ahead_s += TTL_S
    assert first.epoch == 0, "the term ends at once, whatever the tasks do"
    record = await store.get(LEADER_KEY)
    assert record is not None
    await store.revoke(first.leader.lease if first.leader else 0)
    await until(lambda: first.epoch or second.epoch)
    leader = first if first.epoch else second
    assert leader.epoch > old_epoch
    await first.close()
    await second.close()


async def test_a_sole_manager_leads_at_once_with_a_higher_term_each_time(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        store = await SqliteMetadataStore.open(tmp_path / "own.db")
        manager = Candidate(store, "manager", SOLE_LEASE_S)
        manager.begin()
        await until(lambda one=manager: one.epoch)  # type: ignore[misc]
        epochs.append(manager.epoch)
        await store.close()  # as if it were killed
        await manager.close()
    assert epochs == sorted(set(epochs))


async def test_two_managers_with_one_name_lead_one_after_the_other(store: SqliteMetadataStore) -> None:
    first = Candidate(store, "same")
    first.begin()
    await until(lambda: first.epoch and first.managers)
    second = Candidate(store, "same")
    second._manager = ManagerRecord(manager_id="same", address="elsewhere:1")
    second.begin()
    await until(lambda: second.leader)
    assert second.make_not_leading_error().fields == {"leader": "same:1"}
    await first.close()
    await until(lambda: second.epoch and second.managers)
    assert second.managers["same"].address == "elsewhere:1"
    await second.close()
