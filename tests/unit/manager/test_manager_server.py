"""Any manager names the leader; the leader names itself."""

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.waiting import until
from penstock.core.cluster.manager_records import ManagerRecord
from penstock.manager.manager_server import LeaderService
from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from tests.managers import make_manager


async def test_leader_and_follower_name_the_same_leader(tmp_path: Path) -> None:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    context: Any = None
    first, second = [
        make_manager(store, None, ManagerRecord(manager_id=name, address=f"{name}:1"), lease_s=60.0)
        for name in ("a", "b")
    ]
    assert await LeaderService(first.control).Leader(LeaderRequest(), context) == LeaderResponse(manager_id="a")
    await first.start()
    await second.start(is_sole=False)
    elections = first.control.election, second.control.election
    await until(lambda: all(len(each.managers) == 2 and each.leader for each in elections), "both know both")
    told = await asyncio.gather(
        *[LeaderService(each.control).Leader(LeaderRequest(), context) for each in (first, second)]
    )
    assert [(each.manager_id, each.is_leader, each.leader, each.epoch) for each in told] == [
        ("a", True, "a:1", first.control.epoch),
        ("b", False, "a:1", first.control.epoch),
    ]
    assert all(sorted(each.managers) == ["a:1", "b:1"] for each in told)
    assert {each.history for each in told} == {first.control.desired.history}
    later = LeaderRequest(history=first.control.desired.history, epoch=first.control.epoch + 9)
    assert (await LeaderService(second.control).Leader(later, context)).history == first.control.desired.history, (
        "the follower keeps its history"
    )
    assert (await LeaderService(first.control).Leader(later, context)).history not in ("", later.history)
    await first.close()
    await second.close()
    await store.close()
