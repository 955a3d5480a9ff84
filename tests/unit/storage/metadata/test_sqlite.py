"""The metadata store's file: upgrades, locking, and full disks."""

import asyncio
import errno
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, LeaseLost, StoreUnavailable, Unavailable
from penstock.storage.metadata import sqlite_file
from penstock.storage.metadata.metadata_store import Change, Write
from penstock.storage.metadata.opening import open_metadata
from penstock.storage.metadata.sqlite import SqliteMetadataStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def write_earlier(file: Path) -> None:
    """Write a database of Penstock 0.2."""
    with sqlite3.connect(file) as earlier:
        earlier.execute("CREATE TABLE blocks (block_id TEXT PRIMARY KEY, model TEXT, version TEXT, created_at TEXT)")
        earlier.execute("CREATE TABLE routing (model TEXT PRIMARY KEY, routing TEXT, created_at TEXT)")
        earlier.execute("INSERT INTO blocks VALUES ('blk-1', 'm', '1', ''), ('blk-2', 'm', '2', '')")
        earlier.execute("INSERT INTO routing VALUES ('m', 'first', '')")
    earlier.close()


EARLIER = {
    "blocks/blk-1": b'{"model": "m", "version": "1"}',
    "blocks/blk-2": b'{"model": "m", "version": "2"}',
    "routing/m": b"first",
}


async def contents(store: SqliteMetadataStore) -> dict[str, bytes]:
    return {record.key: record.value for record in (await store.list("")).records}


async def test_records_and_revisions_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "data" / "metadata.db"
    store = await SqliteMetadataStore.open(file)
    await store.put("a", b"1")
    revision = await store.put("a", b"2")
    last = await store.delete("b") or await store.put("b", b"3")
    await store.close()
    again = await SqliteMetadataStore.open(file)
    assert (found := await again.get("a")) is not None
    assert (found.value, found.revision) == (b"2", revision)
    assert (await again.list("")).revision >= last
    assert await again.put("c", b"") > last
    await again.close()


async def test_leases_end_with_the_process_and_the_revision_grows_with_each_start(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
        assert await store.get("leader") is None
        epochs.append(await store.put("leader", b"me", expected=0, lease=await store.grant(60.0)))
        await store.close()
    assert epochs == sorted(set(epochs))


async def test_a_lease_ends_by_the_clock_and_watchers_are_notified(tmp_path: Path) -> None:
    clock = Clock()
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db", clock=clock)
    lease = await store.grant(2.0)
    revision = await store.put("leader", b"me", lease=lease)
    watching = store.watch("leader", revision)
    clock.now += 1.5
    assert await store.keep_alive(lease) == 2.0
    clock.now += 1.5
    assert await store.get("leader") is not None
    clock.now += 0.5
    assert await store.get("leader") is None
    assert list(await anext(watching)) == [Change("leader", None, revision + 1)]
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    await store.close()


async def test_a_lease_ends_without_calls(tmp_path: Path) -> None:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    revision = await store.put("leader", b"me", lease=await store.grant(0.05))
    assert list(await anext(store.watch("leader", revision))) == [Change("leader", None, revision + 1)]
    await store.close()


async def test_a_second_manager_is_refused(tmp_path: Path) -> None:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    with pytest.raises(ConfigError, match="another manager uses this metadata store") as refused:
        await open_metadata("sqlite:///metadata.db", tmp_path)
    assert refused.value.reason == "in_use"
    assert "etcd" in refused.value.message
    await store.close()
    await (await open_metadata("sqlite:///metadata.db", tmp_path)).close()


async def test_tables_of_an_earlier_version_are_converted(tmp_path: Path) -> None:
    file = tmp_path / "metadata.db"
    write_earlier(file)
    store = await SqliteMetadataStore.open(file)
    assert await contents(store) == EARLIER
    await store.delete("routing/m")
    await store.close()
    again = await SqliteMetadataStore.open(file)
    assert await contents(again) == {key: value for key, value in EARLIER.items() if key != "routing/m"}, "once"
    await again.close()


async def test_the_write_ahead_log_of_an_earlier_version_is_converted(tmp_path: Path) -> None:
    file = tmp_path / "metadata.db"
    write_earlier(file)
    with sqlite3.connect(file) as earlier:
        earlier.execute("PRAGMA journal_mode=WAL")
        earlier.execute("INSERT INTO routing VALUES ('n', 'logged', '')")
    shutil.copytree(tmp_path, tmp_path / "killed")  # as it is while the log has changes that the file does not have
    earlier.close()
    store = await SqliteMetadataStore.open(tmp_path / "killed" / "metadata.db")
    assert await contents(store) == EARLIER | {"routing/n": b"logged"}
    assert not (tmp_path / "killed" / "metadata.db-wal").exists()
    await store.close()


async def test_a_file_that_is_not_a_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metadata.db").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="cannot be opened"):
        await SqliteMetadataStore.open(tmp_path / "metadata.db")


async def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    file = tmp_path / "data" / "metadata.db"
    await (await SqliteMetadataStore.open(file)).close()
    file.chmod(0o644)  # of an earlier version
    store = await SqliteMetadataStore.open(file)
    await store.put("a", b"1")
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}
    assert file.parent.stat().st_mode & 0o777 == 0o700
    await store.close()


def make_unwritable(monkeypatch: pytest.MonkeyPatch, code: int, reason: str) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, reason)

    monkeypatch.setattr(sqlite_file, "make_private", refuse)
    monkeypatch.setattr(sqlite_file, "lock_file", refuse)


@pytest.mark.parametrize("is_earlier", [True, False])
async def test_changes_that_cannot_be_written_stay_in_memory_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    file = tmp_path / "metadata.db"
    write_earlier(file)
    revision = 1
    if not is_earlier:
        store = await SqliteMetadataStore.open(file)
        revision = (await store.list("")).revision
        await store.close()
    make_unwritable(monkeypatch, errno.ENOSPC, "No space left on device")
    degraded = await SqliteMetadataStore.open(file)
    assert await contents(degraded) == EARLIER, "the existing records can be read"
    with pytest.raises(Unavailable, match="cannot be written: No space left on device") as refused:
        await degraded.put("routing/m", b"second")
    assert str(tmp_path) not in refused.value.message
    assert await degraded.commit([Write("blocks/blk-3", b"{}", may_wait=True)]) > revision
    leader = await degraded.put("leader", b"me", lease=await degraded.grant(60.0))
    monkeypatch.undo()
    assert await contents(degraded) == EARLIER | {"blocks/blk-3": b"{}", "leader": b"me"}
    await degraded.put("routing/m", b"second")
    await degraded.close()
    again = await SqliteMetadataStore.open(file)
    assert await contents(again) == EARLIER | {"blocks/blk-3": b"{}", "routing/m": b"second"}, (
        "the records are written at the next chance"
    )
    assert (await again.list("")).revision > leader
    await again.close()


async def test_revisions_do_not_go_back_if_the_disk_is_never_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unwritable(monkeypatch, errno.EROFS, "Read-only file system")
    revisions = []
    for _ in range(2):
        store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
        assert await contents(store) == {}
        revisions += [await store.commit([Write("a", b"", may_wait=True)]) for _ in range(2)]
        await store.close()
    assert revisions == sorted(set(revisions))


async def test_a_closed_store_refuses_calls(tmp_path: Path) -> None:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    watching = store.watch("", 0)
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.put("a", b"1")
    with pytest.raises(StoreUnavailable, match="closed"):
        await anext(watching)


WRITER = """
import asyncio, sys
from pathlib import Path
from penstock.storage.metadata.sqlite import SqliteMetadataStore

async def main():
    store = await SqliteMetadataStore.open(Path(sys.argv[1]))
    lease = await store.grant(60.0)
    for number in range(1_000_000):
        await store.put("number", str(number).encode())
        print(number, await store.put("leased", b"", lease=lease), flush=True)

asyncio.run(main())
"""


async def test_acknowledged_writes_survive_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "metadata.db"
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(file), stdout=asyncio.subprocess.PIPE
    )
    assert writer.stdout is not None
    lines = [await writer.stdout.readline() for _ in range(20)]
    writer.kill()
    lines += (await writer.communicate())[0].splitlines(keepends=True)
    said = [line for line in lines if line.endswith(b"\n")][-1].split()
    store = await SqliteMetadataStore.open(file)
    record = await store.get("number")
    assert record is not None
    assert int(record.value) >= int(said[0])
    assert (await store.list("")).revision >= int(said[1])
    assert await store.get("leased") is None
    await store.close()
