"""What the manager shows of the whole cluster, from what a worker and a gateway told it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.core.blocks import BlockState
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.manager.deployed_block import WorkerState
from penstock.manager.lives import WorkerArrived, WorkerHeard
from penstock.manager.manager import Manager, now
from penstock.manager.overview import Overview
from penstock.manager.reign import BlockCount, Facts, Load, Report
from penstock.storage.metadata.opening import DEFAULT_URL, open_metadata


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[Manager]:
    (tmp_path / "models" / "a" / "1").mkdir(parents=True)
    (tmp_path / "models" / "a" / "1" / "model.onnx").write_bytes(b"never read here")
    (tmp_path / "models" / "a" / "model.yaml").write_text("task: tensor\n")
    store = await open_metadata(DEFAULT_URL, tmp_path)
    found = Manager(store, tmp_path / "models", is_fresh=True)
    await found.start()
    yield found
    await found.close()
    await store.close()


async def test_it_shows_who_leads_what_blocks_do_and_what_workers_use(manager: Manager) -> None:
    overview = Overview(manager)
    (block,) = manager.reign.registry.blocks()
    arrived = WorkerArrived("n.worker-0", "1-a", 1)
    manager.reign.arrive(arrived, Facts("n", cpus=4, memory_bytes=100), Report([]), now())
    state = (block.block_id, WorkerState(BlockState.READY, "", block.revision, True))
    load = Load(1.5, 10, jobs=3, waiting=2, busy=1, instances=2, counts={block.block_id: BlockCount(9, 1, 0.5)})
    manager.reign.hear(WorkerHeard("n.worker-0", 1), Report([state], is_snapshot=False), load, now())
    answers = ModelAnswers("a", "1", {"ok": 5, "engine_failed": 2}, [1, 5], 2.0)
    for hears in manager.on_answers:
        hears("gateway-0", "earlier", [answers])
        hears("gateway-0", "later", [answers])
        hears("gateway-0", "later", [answers])  # since it began: the same again
        hears("gateway-1", "first", [answers._replace(codes={"ok": 1})])
    found = overview.look()
    assert (found.is_leader, found.epoch, found.revision) == (True, manager.epoch, manager.desired.revision)
    (shown,) = found.blocks
    assert (shown.model, shown.state, shown.wanted, shown.placed, shown.serving) == ("a", "ready", 1, 1, 1)
    assert shown.answers is not None
    assert shown.answers.codes == {"ok": 11, "engine_failed": 4}
    assert (shown.answers.buckets, shown.answers.seconds) == ([3, 15], 6.0)
    (worker,) = found.workers
    assert (worker.state, worker.cpu, worker.cpus, worker.jobs, worker.busy) == ("alive", 1.5, 4, 3, 1)
    assert [(each.block_id, each.requests, each.errors) for each in worker.blocks] == [(block.block_id, 9, 1)]
    assert any(family.name == "penstock_cluster_epoch" for family in overview.collector().collect())
