"""One suite for all metadata stores (SQLite, a real etcd of three nodes), and failures of etcd's nodes."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path

import grpc
import pytest

from benchmarks.etcd import Etcd
from penstock.core.errors import Compacted, ConfigError, Conflict, LeaseLost, StoreUnavailable
from penstock.pb.etcd import rpc_pb2 as pb
from penstock.pb.etcd.rpc_pb2_grpc import KVStub
from penstock.storage.metadata.etcd import EtcdMetadataStore
from penstock.storage.metadata.following import follow
from penstock.storage.metadata.metadata_store import Change, Compare, MetadataStore, Record, Snapshot, Write
from penstock.storage.metadata.opening import open_metadata

PATIENCE_S = 20.0  # of a call while a test kills servers on a busy machine
_numbers = count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
async def etcd_store(etcd: Etcd) -> AsyncIterator[EtcdMetadataStore]:
    store = EtcdMetadataStore.from_url(f"{etcd.url}/test-{next(_numbers)}", PATIENCE_S)
    yield store
    await store.close()


@pytest.fixture(params=["sqlite", "etcd"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MetadataStore]:
    if request.param == "etcd":
        url = f"{request.getfixturevalue('etcd').url}/test-{next(_numbers)}"
    else:
        url = "sqlite:///metadata.db"
    opened = await open_metadata(url, tmp_path)
    yield opened
    await opened.close()


async def take(store: MetadataStore, prefix: str, after: int, number: int) -> list[Sequence[Change]]:
    found: list[Sequence[Change]] = []
    async with aclosing(store.watch(prefix, after)) as watching:  # type: ignore[type-var]
        async with asyncio.timeout(60):
            async for changes in watching:
                found.append(changes)
                if len(found) == number:
                    break
    return found


async def test_a_put_record_is_read_with_its_revision(store: MetadataStore) -> None:
    assert await store.get("a/1") is None
    first = await store.put("a/1", b"one")
    second = await store.put("a/2", b"\x00two\xff")
    other = await store.put("b", b"")
    assert first < second < other
    assert await store.get("a/2") == Record("a/2", b"\x00two\xff", second)
    assert await store.get("b") == Record("b", b"", other)
    assert await store.list("a/") == Snapshot(
        other, (Record("a/1", b"one", first), Record("a/2", b"\x00two\xff", second))
    )
    assert len((await store.list("")).records) == 3
    again = await store.put("a/1", b"uno")
    assert await store.get("a/1") == Record("a/1", b"uno", again)
    gone = await store.delete("a/1")
    assert gone > again
    assert await store.get("a/1") is None
    await store.delete("a/1")


async def test_a_write_with_an_outdated_revision_changes_nothing(store: MetadataStore) -> None:
    first = await store.put("a", b"1", expected=0)
    with pytest.raises(Conflict, match="'a' was changed"):
        await store.put("a", b"2", expected=0)
    second = await store.put("a", b"2", expected=first)
    for stale in (first, second + 100):
        with pytest.raises(Conflict):
            await store.put("a", b"3", expected=stale)
        with pytest.raises(Conflict):
            await store.delete("a", expected=stale)
    with pytest.raises(Conflict):
        await store.delete("b", expected=second)
    assert await store.get("a") == Record("a", b"2", second)
    await store.delete("a", expected=second)
    await store.put("a", b"4", expected=0)


async def test_a_commit_is_atomic(store: MetadataStore) -> None:
    leader = await store.put("leader", b"me")
    await store.put("old", b"")
    writes = [Write("a", b"1"), Write("b", b"2"), Write("old", None)]
    with pytest.raises(Conflict, match="'leader' was changed"):
        await store.commit(writes, [Compare("a", 0), Compare("leader", leader + 1)])
    assert [record.key for record in (await store.list("")).records] == ["leader", "old"]
    revision = await store.commit(writes, [Compare("a", 0), Compare("leader", leader)])
    found = await store.list("")
    assert found.revision == revision
    assert found.records == (Record("a", b"1", revision), Record("b", b"2", revision), Record("leader", b"me", leader))
    assert await store.commit([], [Compare("leader", leader)]) <= revision, "an empty commit checks the compare"
    assert await store.delete("nobody") <= revision
    with pytest.raises(Conflict):
        await store.commit([], [Compare("leader", revision)])


async def test_writers_that_compare_do_not_undo_each_other(store: MetadataStore) -> None:
    async def add() -> None:
        for _ in range(10):
            while True:
                record = await store.get("sum")
                value, revision = (int(record.value), record.revision) if record else (0, 0)
                try:
                    await store.put("sum", str(value + 1).encode(), expected=revision)
                    break
                except Conflict:
                    pass

    await asyncio.gather(*[add() for _ in range(4)])
    record = await store.get("sum")
    assert record is not None
    assert record.value == b"40"


async def test_a_watch_yields_one_item_per_revision_in_order(store: MetadataStore) -> None:
    before = await store.put("a/0", b"before")
    watching = asyncio.create_task(take(store, "a/", before, 4))
    first = await store.put("a/1", b"1")
    await store.put("b/1", b"not told")
    second = await store.commit([Write("a/2", b"2"), Write("a/1", None), Write("b/2", b"")])
    third = await store.put("a/2", b"2")
    fourth = await store.delete("a/2")
    told = await watching
    assert [sorted(changes, key=lambda change: change.key) for changes in told] == [
        [Change("a/1", b"1", first)],
        [Change("a/1", None, second), Change("a/2", b"2", second)],
        [Change("a/2", b"2", third)],
        [Change("a/2", None, fourth)],
    ]
    assert await take(store, "a/", second, 2) == told[2:], "a watch can start at any revision"


async def test_the_end_of_a_lease_deletes_its_records(store: MetadataStore) -> None:
    lease = await store.grant(60.0)
    assert 0 < await store.keep_alive(lease) <= 60
    revision = await store.commit([Write("leader", b"me", lease), Write("kept", b"")], [Compare("leader", 0)])
    await store.put("managers/me", b"", lease=lease)
    await store.put("managers/freed", b"", lease=lease)
    await store.put("managers/freed", b"")
    await store.revoke(lease)
    assert [record.key for record in (await store.list("")).records] == ["kept", "managers/freed"]
    (_, (gone,)) = await take(store, "leader", revision - 1, 2)
    assert (gone.key, gone.value) == ("leader", None)
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    with pytest.raises(LeaseLost):
        await store.put("leader", b"me", lease=lease)
    await store.revoke(lease)


async def test_a_lease_ends_without_renewal(store: MetadataStore) -> None:
    revision = await store.put("leader", b"me", lease=await store.grant(1.0))
    ((gone,),) = await take(store, "leader", revision, 1)
    assert (gone.key, gone.value) == ("leader", None)
    await store.put("leader", b"you", expected=0)


async def test_followers_receive_a_snapshot_and_then_changes(store: MetadataStore) -> None:
    await store.put("a/1", b"1")
    heard: list[object] = []
    async with aclosing(follow(store, "a/")) as following:  # type: ignore[type-var]
        async for each in following:
            heard.append([record.key for record in each.records] if isinstance(each, Snapshot) else each[0].key)
            if len(heard) == 3:
                break
            await store.put(f"a/{len(heard) + 1}", b"")
    assert heard == [["a/1"], "a/2", "a/3"]


@pytest.mark.parametrize(
    "url", ["redis://host", "sqlite://", "sqlite:///", "sqlite", "etcd:///p", "etcd://me:word@host"]
)
async def test_an_invalid_url_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="etcd://") as refused:
        await open_metadata(url, tmp_path)
    assert "me:word" not in refused.value.message


# --- etcd alone


async def compact(etcd: Etcd, revision: int) -> None:
    async with grpc.aio.insecure_channel(etcd.nodes[0].address) as channel:
        await KVStub(channel).Compact(pb.CompactionRequest(revision=revision, physical=True), timeout=20)


async def test_compacted_changes_are_reported(etcd: Etcd, etcd_store: EtcdMetadataStore) -> None:
    first = await etcd_store.put("a", b"1")
    last = await etcd_store.put("a", b"2")
    await compact(etcd, last)
    with pytest.raises(Compacted):
        await take(etcd_store, "", first - 1, 1)
    assert await take(etcd_store, "", last - 1, 1) == [[Change("a", b"2", last)]]


async def test_a_watch_after_a_future_revision_is_refused(etcd_store: EtcdMetadataStore) -> None:
    """A store that was wiped or restored from a backup would send no changes for a long time."""
    now = await etcd_store.put("a", b"1")
    with pytest.raises(Compacted):
        await take(etcd_store, "", now + 1000, 1)


async def test_two_clusters_in_one_etcd_do_not_share_records(etcd: Etcd) -> None:
    one, other = (
        EtcdMetadataStore.from_url(f"{etcd.url}/one", PATIENCE_S),
        EtcdMetadataStore.from_url(f"{etcd.url}/one2", PATIENCE_S),
    )
    await one.put("a", b"1")
    assert (await other.list("")).records == ()
    await other.put("a", b"2", expected=0)
    assert len((await one.list("")).records) == 1
    seen = await one.put("a", b"3")
    await other.put("a", b"4")
    assert await one.delete("nobody") <= seen, "changes of other clusters are not awaited"
    await one.close()
    await other.close()


class Journal:
    """Writes numbers one after the other, and remembers those that were acknowledged; watches them as well."""

    def __init__(self, store: EtcdMetadataStore, after: int) -> None:
        self._store = store
        self.acknowledged: list[int] = []
        self.unknown: set[int] = set()
        self.heard: list[int] = []
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._watch(after))]

    async def _write(self) -> None:
        for number in count(1):
            try:
                await self._store.put("number", str(number).encode())
                self.acknowledged.append(number)
            except StoreUnavailable:
                self.unknown.add(number)
            await asyncio.sleep(0.01)

    async def _watch(self, after: int) -> None:
        async for changes in self._store.watch("number", after):
            self.heard += [int(change.value or b"0") for change in changes]

    async def more(self, number: int = 3) -> None:
        """Wait until `number` more values were written and watched."""
        wanted = len(self.acknowledged) + number
        async with asyncio.timeout(90):
            while len(self.acknowledged) < wanted or self.heard[-1:] < self.acknowledged[wanted - 1 : wanted]:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize("is_killed", [True, False])
async def test_writes_and_watches_survive_nodes_that_stop_in_turn(
    etcd: Etcd, etcd_store: EtcdMetadataStore, is_killed: bool
) -> None:
    journal = Journal(etcd_store, (await etcd_store.list("")).revision)
    try:
        for node in etcd.nodes:
            await journal.more()
            if is_killed:
                node.kill()
            else:
                node.freeze()
            await journal.more()
            if is_killed:
                node.start(etcd.nodes)
            else:
                node.thaw()
            await asyncio.to_thread(etcd.wait_until_healthy)
        await journal.more()
    finally:
        await journal.close()
    assert journal.heard == sorted(set(journal.heard)), "each change comes once and in order"
    assert set(journal.acknowledged) - set(journal.heard) <= set(journal.acknowledged[-2:]), (
        "no acknowledged change is lost"
    )
    assert set(journal.heard) - set(journal.acknowledged) <= journal.unknown | {journal.heard[-1]}


async def test_a_call_without_an_answer_ends_in_time(tmp_path: Path) -> None:
    store = EtcdMetadataStore(["127.0.0.1:1", "127.0.0.1:2"], timeout_s=0.2)
    with pytest.raises(StoreUnavailable, match=r"did not answer in time; last error: 127\.0\.0\.1:") as refused:
        await store.put("a", b"1")
    assert not refused.value.is_definite
    with pytest.raises(StoreUnavailable):
        await store.keep_alive(1)
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.get("a")


async def test_closing_ends_running_calls(etcd: Etcd) -> None:
    store = EtcdMetadataStore.from_url(etcd.url, PATIENCE_S)
    watching = asyncio.create_task(take(store, "", 1_000_000, 1))
    await store.get("a")
    await store.close()
    # It may have looked before.
    with pytest.raises((StoreUnavailable, Compacted), match=r"closed|not at revision|no longer has revision"):
        await watching
