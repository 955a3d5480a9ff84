"""Cached answers in a file: they outlive the gateway, are bounded, and no other file is overwritten."""

import asyncio
import errno
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.core.errors import ConfigError, Unavailable
from penstock.features.cache.stores import sqlite_cache as cache_sqlite
from penstock.features.cache.stores import sqlite_cache_file as cache_sqlite_file
from penstock.features.cache.stores.lru import ENTRY_BYTES
from penstock.features.cache.stores.sqlite_cache import MIN_BUFFER_BYTES, SqliteStore

MAX_BYTES = 4 * 1024 * 1024


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def opened(folder: Path, max_bytes: int = MAX_BYTES, clock: Clock | None = None) -> SqliteStore:
    store = SqliteStore(folder / "cache.db", max_bytes, timeout_s=10.0, clock=clock or Clock())
    await store.start()
    return store


async def test_entries_survive_a_restart(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.set(b"a", b"1" * 10_000, 60.0)
    await store.set(b"b", b"2", 60.0)
    await store.set(b"b", b"3", 60.0)
    await store.close()
    again = await opened(tmp_path)
    assert again.get_counts().entries == 2
    assert again.get_now(b"a") is None
    assert await again.exists(b"a")
    assert await again.get(b"a") == b"1" * 10_000
    assert again.get_now(b"a") == b"1" * 10_000
    assert await again.get(b"b") == b"3"
    await again.close()


async def test_entries_that_were_written_survive_a_kill(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from penstock.features.cache.stores.sqlite_cache import SqliteStore\n"
        "async def main():\n"
        "    store = SqliteStore(Path(sys.argv[1]), 1_000_000, 10.0)\n"
        "    await store.start()\n"
        "    for number in range(500):\n"
        "        await store.set(b'k%d' % number, b'v' * 500, 3600.0)\n"
        "    while store._pending:\n"
        "        await asyncio.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    file = tmp_path / "cache.db"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(file), stderr=subprocess.PIPE)
    _, complaint = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == -signal.SIGKILL, complaint.decode()
    store = SqliteStore(file, 1_000_000, timeout_s=10.0)
    await store.start()
    assert store.get_counts().entries == 500
    assert await store.get(b"k499") == b"v" * 500
    await store.close()


async def test_entries_expire_while_no_gateway_runs(tmp_path: Path) -> None:
    clock = Clock()
    store = await opened(tmp_path, clock=clock)
    await store.set(b"short", b"1", 10.0)
    await store.set(b"long", b"2", 100.0)
    await store.close()
    clock.now += 10.0
    again = await opened(tmp_path, clock=clock)
    assert (await again.get(b"short"), await again.get(b"long")) == (None, b"2")
    assert again.get_counts().entries == 1
    await again.close()
    assert rows(tmp_path) == {b"long": b"2"}


async def test_the_file_has_the_same_size_limit_as_memory(tmp_path: Path) -> None:
    store = await opened(tmp_path, max_bytes=1_000_000)
    for number in range(4000):
        await store.set(b"%d" % number, bytes(4100), 60.0)  # slightly more than a page: the worst way to fill pages
        if number % 50 == 0:
            await store._flush()
    assert store.get_counts().size_bytes <= 1_000_000
    assert store.get_counts().evicted_by_size > 3000
    kept = set(store._lru)
    await store.close()
    assert rows(tmp_path).keys() == kept
    assert size_bytes(tmp_path) < 2_100_000


async def test_a_smaller_bound_shrinks_the_file(tmp_path: Path) -> None:
    store = await opened(tmp_path, max_bytes=4_000_000)
    for number in range(300):
        await store.set(b"%d" % number, bytes(10_000), 60.0)
        if number % 50 == 0:
            await store._flush()
    await store.close()
    assert (tmp_path / "cache.db").stat().st_size > 2_000_000
    again = await opened(tmp_path, max_bytes=10 * (10_000 + 3 + ENTRY_BYTES))
    assert set(again._lru) == {b"%d" % number for number in range(290, 300)}
    await again.close()
    assert (tmp_path / "cache.db").stat().st_size < 300_000


async def test_evicted_and_deleted_entries_are_removed_from_the_file(tmp_path: Path) -> None:
    store = await opened(tmp_path, max_bytes=2 * (1000 + 1 + ENTRY_BYTES))
    for key in (b"a", b"b", b"c"):
        await store.set(key, bytes(1000), 60.0)
    await store.delete(b"b")
    await store.close()
    assert rows(tmp_path) == {b"c": bytes(1000)}


async def test_clearing_is_written_before_it_returns(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.set(b"x:1", b"1", 60.0)
    await store.set(b"y:1", b"2", 60.0)
    await store._flush()
    assert await store.clear(b"x:") == 1
    assert not store._pending
    await store.close()
    assert rows(tmp_path) == {b"y:1": b"2"}


async def test_a_full_buffer_drops_and_counts_writes(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    half = bytes(MIN_BUFFER_BYTES // 2 + 1)
    await store.set(b"a", half, 60.0)  # sets do not let the writer run in between
    await store.set(b"b", half, 60.0)
    assert store.get_counts().dropped == 1
    assert store.get_now(b"b") == half
    await store.close()
    assert rows(tmp_path).keys() == {b"a"}


async def test_a_dropped_write_does_not_restore_an_older_entry(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.set(b"a", b"old", 60.0)
    await store._flush()
    await store.set(b"full", bytes(MIN_BUFFER_BYTES), 60.0)
    await store.set(b"a", b"new", 60.0)
    assert (store.get_now(b"a"), store.get_counts().dropped) == (b"new", 1)
    await store.close()
    assert rows(tmp_path).keys() == {b"full"}


async def test_an_entry_deleted_before_it_was_written_leaves_nothing_pending(tmp_path: Path) -> None:
    store = await opened(tmp_path, max_bytes=2 * (1000 + 4 + ENTRY_BYTES))
    for number in range(1000):
        await store.set(b"%04d" % number, bytes(1000), 60.0)
    assert len(store._pending) == 2
    assert store._pending_bytes == 2000
    await store.close()


@pytest.mark.parametrize(("value", "found"), [(b"new", {b"a": b"new"}), (bytes(MAX_BYTES), {})], ids=["set", "gone"])
async def test_an_entry_that_changes_during_a_write_is_written_again(
    tmp_path: Path, value: bytes, found: dict[bytes, bytes]
) -> None:
    store = await opened(tmp_path)
    await store.set(b"a", b"old", 60.0)
    writing = asyncio.create_task(store._flush())
    await asyncio.sleep(0)  # the write has started
    assert not writing.done()
    await store.set(b"a", value, 60.0)  # a value larger than the store only removes the old one
    await writing
    await store.close()
    assert rows(tmp_path) == found


async def test_the_writer_writes_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_sqlite, "WRITE_EVERY_S", 0.0)
    store = await opened(tmp_path)
    await store.set(b"a", b"1", 60.0)
    async with asyncio.timeout(20):
        while store._pending:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert store._on_disk == {b"a"}
    await store.close()


async def test_a_damaged_cache_file_is_recreated(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    for number in range(100):
        await store.set(b"%d" % number, bytes(3000), 60.0)
    await store.close()
    file = tmp_path / "cache.db"
    content = bytearray(file.read_bytes())
    content[4096:] = b"\x5a" * (len(content) - 4096)
    file.write_bytes(content)
    with capture_logs() as logs:
        again = await opened(tmp_path)
    assert [entry["event"] for entry in logs] == ["cache_file_damaged"]
    assert again.get_counts().entries == 0
    await again.set(b"a", b"1", 60.0)
    await again.close()
    assert rows(tmp_path) == {b"a": b"1"}


async def test_a_cache_file_of_another_version_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened(tmp_path)
    await store.set(b"a", b"1", 60.0)
    await store.close()
    monkeypatch.setattr(cache_sqlite_file, "SCHEMA_VERSION", 2)
    with capture_logs() as logs:
        again = await opened(tmp_path)
    assert "version 1" in logs[0]["error"]
    assert again.get_counts().entries == 0
    await again.close()


async def test_a_file_of_another_program_is_left_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "cache.db"
    file.write_bytes(b"somebody's notes" * 1000)
    with pytest.raises(ConfigError, match="not a response cache"):
        await opened(tmp_path)
    assert file.read_bytes() == b"somebody's notes" * 1000
    file.unlink()
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE blocks (block_id TEXT)")
    other.close()
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="not a response cache"):
        await opened(tmp_path)
    assert file.read_bytes() == before


async def test_two_stores_cannot_use_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_sqlite_file, "BUSY_TIMEOUT_S", 0.01)
    first = await opened(tmp_path)
    await first.set(b"a", b"1", 60.0)
    with pytest.raises(ConfigError, match="another server has it open"):
        await opened(tmp_path)
    assert await first.get(b"a") == b"1"
    await first.close()
    assert rows(tmp_path) == {b"a": b"1"}


async def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder"):
        await opened(tmp_path / "file" / "below")


async def test_a_file_that_breaks_is_counted_and_logged_once_without_failing_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_sqlite, "WRITE_EVERY_S", 3600.0)  # no other test may use the broken file
    store = await opened(tmp_path)
    await store.set(b"a", b"1", 60.0)
    await store.close()
    store = await opened(tmp_path)
    assert store._connection is not None
    await store._connection.execute("ALTER TABLE entries RENAME TO away")
    await store._connection.commit()
    with capture_logs() as logs:
        assert await store.get(b"a") is None
        await store.set(b"b", b"2", 60.0)
        assert await store.get(b"b") == b"2"
        with pytest.raises(Unavailable):
            await store.clear()
        assert store.get_counts().errors == 2
        await store._connection.execute("ALTER TABLE away RENAME TO entries")
        await store._connection.commit()
        assert await store.clear() == 0
    assert [entry["event"] for entry in logs] == ["cache_file_failed", "cache_file_recovered"]
    await store.close()
    assert rows(tmp_path) == {}


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def rows(folder: Path) -> dict[bytes, bytes]:
    connection = sqlite3.connect(folder / "cache.db")
    found = dict(connection.execute("SELECT key, value FROM entries").fetchall())
    connection.close()
    return found


async def test_an_unwritable_disk_leaves_the_memory_in_use_until_it_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(tmp_path)
    await store.set(b"old", b"of the file", 60.0)
    await store.close()

    def refuse(file: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache_sqlite_file, "make_private", refuse)
    with capture_logs() as logs:
        again = await opened(tmp_path)
        await again.set(b"new", b"in memory", 60.0)
        assert await again.get(b"old") is None
        assert await again.get(b"new") == b"in memory"
        with pytest.raises(Unavailable, match="cannot be written"):
            await again.clear(b"no such")
        monkeypatch.undo()
        await until(lambda: [line["event"] for line in logs] == ["cache_file_failed", "cache_file_recovered"])
    await again.close()
    third = await opened(tmp_path)
    assert await third.get(b"new") == b"in memory"
    assert await third.get(b"old") is None, "a value that only the file has may be outdated"
    await third.close()
