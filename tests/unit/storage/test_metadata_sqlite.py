"""Blocks keep their ids over restarts."""

import errno
import shutil
import sqlite3
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.storage import metadata_sqlite
from penstock.storage.metadata_sqlite import SqliteMetadata


async def test_a_version_keeps_its_block(tmp_path: Path) -> None:
    store = await SqliteMetadata.open(tmp_path / "data" / "metadata.db")
    first = await store.block_id("m", "1")
    assert first.startswith("blk-")
    assert await store.block_id("m", "1") == first
    assert await store.block_id("m", "2") != first
    await store.close()
    again = await SqliteMetadata.open(tmp_path / "data" / "metadata.db")
    assert await again.block_id("m", "1") == first
    await again.close()


async def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    file = tmp_path / "metadata.db"
    file.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="cannot be opened"):
        await SqliteMetadata.open(file)


async def test_routing_is_kept_replaced_and_forgotten(tmp_path: Path) -> None:
    store = await SqliteMetadata.open(tmp_path / "metadata.db")
    assert await store.routings() == {}
    await store.set_routing("m", "first")
    await store.set_routing("n", "other")
    await store.set_routing("m", "second")
    await store.close()
    again = await SqliteMetadata.open(tmp_path / "metadata.db")
    assert await again.routings() == {"m": "second", "n": "other"}
    await again.set_routing("m", "")
    await again.set_routing("nobody", "")
    assert await again.routings() == {"n": "other"}
    await again.close()


async def test_a_store_of_an_earlier_version_gets_what_it_lacks(tmp_path: Path) -> None:
    store = await SqliteMetadata.open(tmp_path / "metadata.db")
    block = await store.block_id("m", "1")
    await store.close()
    with sqlite3.connect(tmp_path / "metadata.db") as earlier:
        earlier.execute("DROP TABLE routing")
    earlier.close()
    again = await SqliteMetadata.open(tmp_path / "metadata.db")
    assert await again.routings() == {}
    assert await again.block_id("m", "1") == block
    await again.close()


async def test_the_files_are_their_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "data" / "metadata.db"
    await (await SqliteMetadata.open(file)).close()
    file.chmod(0o644)  # of an earlier version
    store = await SqliteMetadata.open(file)
    await store.block_id("m", "1")
    assert [path.stat().st_mode & 0o777 for path in file.parent.iterdir()] == [0o600]
    assert file.parent.stat().st_mode & 0o777 == 0o700
    await store.close()


async def test_what_cannot_be_written_is_known_for_this_life_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metadata.db"
    store = await SqliteMetadata.open(file)
    old = await store.block_id("m", "1")
    await store.set_routing("m", "first")
    await store.close()

    def refuse(file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metadata_sqlite, "make_private", refuse)
    degraded = await SqliteMetadata.open(file)
    assert await degraded.block_id("m", "1") == old, "what is there is read"
    assert await degraded.routings() == {"m": "first"}
    new = await degraded.block_id("m", "2")
    assert await degraded.block_id("m", "2") == new
    with pytest.raises(Unavailable, match="cannot be written: No space left on device") as refused:
        await degraded.set_routing("m", "second")
    assert str(tmp_path) not in refused.value.message
    assert await degraded.routings() == {"m": "first"}
    monkeypatch.undo()
    await degraded.set_routing("m", "second")
    assert await degraded.block_id("m", "2") == new
    await degraded.close()
    again = await SqliteMetadata.open(file)
    assert await again.block_id("m", "2") == new, "written with the next chance"
    assert await again.routings() == {"m": "second"}
    await again.close()


async def test_a_disk_without_a_file_or_room_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(metadata_sqlite, "make_private", refuse)
    store = await SqliteMetadata.open(tmp_path / "metadata.db")
    assert (await store.block_id("m", "1")).startswith("blk-")
    assert await store.routings() == {}
    await store.close()


async def test_the_write_ahead_log_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "metadata.db"
    store = await SqliteMetadata.open(file)
    block = await store.block_id("m", "1")
    await store.close()
    with sqlite3.connect(file) as earlier:
        earlier.execute("PRAGMA journal_mode=WAL")
        earlier.execute("INSERT INTO routing (model, routing) VALUES ('m', 'logged')")
    shutil.copytree(tmp_path, tmp_path / "killed")  # as it lies there while the log has what the file has not
    earlier.close()
    again = await SqliteMetadata.open(tmp_path / "killed" / "metadata.db")
    assert await again.block_id("m", "1") == block
    assert await again.routings() == {"m": "logged"}
    assert not (tmp_path / "killed" / "metadata.db-wal").exists()
    await again.close()
