"""The leader as read from the metadata store."""

import asyncio
from contextlib import aclosing
from pathlib import Path

from penstock.core.cluster.manager_records import LEADER_KEY, LeaderRecord
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.storage.metadata.stored_leader import StoredLeader
from penstock.wire.leader_connection import LeaderAddress


def record(address: str) -> bytes:
    return LeaderRecord(manager_id="m", address=address, lease=1).model_dump_json().encode()


async def test_each_leader_is_yielded_with_its_epoch(tmp_path: Path) -> None:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    source = StoredLeader(store)
    first = await store.put(LEADER_KEY, record("a:1"))
    async with aclosing(source.follow()) as heard, asyncio.timeout(60):  # type: ignore[type-var]
        assert await anext(heard) == LeaderAddress("a:1", first)
        await store.delete(LEADER_KEY)
        await store.put("leaders-of-others", record("x:1"))
        await store.put(LEADER_KEY, b"of another version")
        second = await store.put(LEADER_KEY, record("b:1"))
        assert await anext(heard) == LeaderAddress("b:1", second)
    await source.close()
