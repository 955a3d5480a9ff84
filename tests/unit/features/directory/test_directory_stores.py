"""One suite for the directory's stores: SQLite, and PyMongo's API as mongomock implements it."""

from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any

import mongomock
import pytest
from pymongo.errors import DuplicateKeyError, PyMongoError

from penstock.app.directory_role import open_directory_store
from penstock.core.config import Config, DirectorySettings
from penstock.core.errors import ConfigError
from penstock.features.directory.directory_query import compile_query
from penstock.features.directory.directory_store import KINDS, DirectoryRecord, DirectoryStore, RecordSearch
from penstock.features.directory.mongo_directory import MongoDirectory
from penstock.features.directory.sqlite_directory import SqliteDirectory


@pytest.fixture(params=["sqlite", "mongomock"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DirectoryStore]:
    made: DirectoryStore
    if request.param == "sqlite":
        made = await SqliteDirectory.open(tmp_path / "directory.db")
    else:
        client: Any = mongomock.MongoClient()
        _bound_by_time(client)
        collections = {kind: client.db[kind] for kind in KINDS}
        made = MongoDirectory(collections, client.close, (PyMongoError,), DuplicateKeyError)
    yield made
    await made.close()


def _bound_by_time(client: Any) -> None:
    """Give mongomock's cursors the method that sets a time limit, which they lack."""
    for kind in KINDS:
        cursor = type(client.db[kind].find({}))
        if not hasattr(cursor, "max_time_ms"):
            cursor.max_time_ms = lambda self, ms: self


def search(query: dict[str, Any], now: float = 0.0, **more: Any) -> RecordSearch:
    return RecordSearch(query, compile_query(query), now, **more)


async def ids(store: DirectoryStore, asked: RecordSearch) -> list[str]:
    return [record.record_id for record in await store.find("servers", asked)]


async def test_records_are_written_once_and_changed_by_revision(store: DirectoryStore) -> None:
    first = DirectoryRecord("a", {"x": {"y": [1, None, True]}}, "key-1")
    assert await store.put("servers", first, replaces=0)
    assert not await store.put("servers", first, replaces=0)
    assert await store.get("servers", "a") == first
    assert await store.get("clusters", "a") is None
    second = DirectoryRecord("a", {"x": 2}, "key-1", 5.0, 2)
    assert await store.put("servers", second, replaces=1)
    assert not await store.put("servers", second, replaces=1)
    assert await store.get("servers", "a") == second
    assert not await store.delete("servers", "a", 1)
    assert await store.delete("servers", "a", 2)
    assert await store.get("servers", "a") is None
    assert await store.count("servers") == 0


async def test_queries_leave_out_ended_leases_and_continue_after_an_id(store: DirectoryStore) -> None:
    for n in range(6):
        record = DirectoryRecord(f"s{n}", {"n": n, "tags": ["a", f"t{n}"]}, expires_at=10.0 if n == 5 else inf)
        await store.put("servers", record, replaces=0)
    assert await ids(store, search({"tags": {"$in": ["t1", "t5"]}})) == ["s1", "s5"]
    assert await ids(store, search({"tags": {"$in": ["t1", "t5"]}}, now=10.0)) == ["s1"]
    assert await ids(store, search({}, after="s1", limit=2)) == ["s2", "s3"]
    assert await ids(store, search({"n": {"$gte": 2}, "tags": {"$regex": "^t[34]$"}})) == ["s3", "s4"]
    assert await store.remove_expired(10.0) == 1
    assert await store.count("servers") == 5


async def test_sqlite_keeps_records_over_a_restart_and_has_one_owner(tmp_path: Path) -> None:
    first = await SqliteDirectory.open(tmp_path / "directory.db")
    record = DirectoryRecord("a", {"x": "ü", "n": 2**53 + 1}, "key-1", 7.5, 3)
    await first.put("servers", record, replaces=0)
    with pytest.raises(ConfigError, match="cannot be opened"):
        await SqliteDirectory.open(tmp_path / "directory.db")
    await first.close()
    second = await SqliteDirectory.open(tmp_path / "directory.db")
    assert await second.get("servers", "a") == record
    await second.close()


@pytest.mark.parametrize("url", ["redis://x", "sqlite://x", "directory.db", "sqlite:///"])
async def test_an_unknown_store_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give sqlite:///file or mongodb://"):
        await open_directory_store(Config(data_dir=tmp_path, directory=DirectorySettings(store=url)))
