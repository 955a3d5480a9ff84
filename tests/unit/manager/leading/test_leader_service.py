"""Any manager says who leads; the leader says so of itself."""

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.waiting import until
from penstock.core.cluster.leaders import ManagerRecord
from penstock.manager.leading.leader_service import LeaderService
from penstock.manager.manager import Manager
from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.storage.metadata.sqlite import SqliteMetadataStore


async def test_leader_and_follower_name_the_same(tmp_path: Path) -> None:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    context: Any = None
    first, second = [
        Manager(store, None, ManagerRecord(manager_id=name, address=f"{name}:1"), 60.0) for name in ("a", "b")
    ]
    assert await LeaderService(first).Leader(LeaderRequest(), context) == LeaderResponse(manager_id="a")
    await first.start()
    await second.start(is_sole=False)
    elections = first.election, second.election
    await until(lambda: all(len(each.managers) == 2 and each.leader for each in elections), "both know both")
    told = await asyncio.gather(*[LeaderService(each).Leader(LeaderRequest(), context) for each in (first, second)])
    assert [(each.manager_id, each.is_leader, each.leader, each.epoch) for each in told] == [
        ("a", True, "a:1", first.epoch),
        ("b", False, "a:1", first.epoch),
    ]
    assert all(sorted(each.managers) == ["a:1", "b:1"] for each in told)
    assert {each.history for each in told} == {first.desired.history}
    later = LeaderRequest(history=first.desired.history, epoch=first.epoch + 9)
    assert (await LeaderService(second).Leader(later, context)).history == first.desired.history, "it does not lead"
    assert (await LeaderService(first).Leader(later, context)).history not in ("", later.history)
    await first.close()
    await second.close()
    await store.close()
