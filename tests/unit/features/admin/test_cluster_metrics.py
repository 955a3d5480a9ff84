"""The manager's metrics of the whole cluster, from the reports of a worker and a gateway."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.core.blocks import BlockState
from penstock.core.cluster.model_answers import ModelAnswers
from penstock.features.admin.cluster_metrics import ClusterOverview
from penstock.manager.control_plane import now
from penstock.manager.deployed_block import WorkerState
from penstock.manager.feature import TrafficReport
from penstock.manager.manager import Manager
from penstock.manager.term import BlockCount, BlocksReport, WorkerFacts, WorkerLoad
from penstock.manager.worker_liveness import WorkerArrived, WorkerReported
from penstock.storage.metadata.opening import DEFAULT_URL, open_metadata
from tests.managers import make_manager


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[Manager]:
    (tmp_path / "models" / "a" / "1").mkdir(parents=True)
    (tmp_path / "models" / "a" / "1" / "model.onnx").write_bytes(b"never read here")
    (tmp_path / "models" / "a" / "model.yaml").write_text("task: tensor\n")
    store = await open_metadata(DEFAULT_URL, tmp_path)
    found = make_manager(store, tmp_path / "models", is_fresh=True)
    await found.start()
    yield found
    await found.close()
    await store.close()


async def test_metrics_show_the_leader_the_blocks_and_the_workers(manager: Manager) -> None:
    overview = ClusterOverview(manager.control)
    (block,) = manager.control.term.blocks.list_blocks()
    arrived = WorkerArrived("n.worker-0", "1-a", 1)
    manager.control.term.worker_joined(arrived, WorkerFacts("n", cpus=4, memory_bytes=100), BlocksReport([]), now())
    state = (block.block_id, WorkerState(BlockState.READY, "", block.revision, True))
    load = WorkerLoad(1.5, 10, jobs=3, waiting=2, busy=1, instances=2, counts={block.block_id: BlockCount(9, 1, 0.5)})
    manager.control.term.worker_reported(
        WorkerReported("n.worker-0", 1), BlocksReport([state], is_snapshot=False), load, now()
    )
    answers = ModelAnswers("a", "1", {"ok": 5, "engine_failed": 2}, [1, 5], 2.0)
    overview.traffic_reported(TrafficReport("gateway-0", "earlier", answers=[answers]))
    for _ in range(2):  # figures count since the incarnation began: the second report repeats them
        overview.traffic_reported(TrafficReport("gateway-0", "later", answers=[answers]))
    overview.traffic_reported(TrafficReport("gateway-1", "first", answers=[answers._replace(codes={"ok": 1})]))
    found = overview.collect_figures()
    assert (found.is_leader, found.epoch, found.revision) == (
        True,
        manager.control.epoch,
        manager.control.desired.revision,
    )
    (shown,) = found.blocks
    assert (shown.model, shown.state) == ("a", "ready")
    assert (shown.wanted_replicas, shown.placed_replicas, shown.serving_replicas) == (1, 1, 1)
    assert shown.answers is not None
    assert shown.answers.codes == {"ok": 11, "engine_failed": 4}
    assert (shown.answers.buckets, shown.answers.seconds) == ([3, 15], 6.0)
    (worker,) = found.workers
    assert (worker.state, worker.cpu, worker.cpus, worker.jobs, worker.busy) == ("alive", 1.5, 4, 3, 1)
    assert [(each.block_id, each.requests, each.errors) for each in worker.blocks] == [(block.block_id, 9, 1)]
    assert any(family.name == "penstock_cluster_epoch" for family in overview.make_collector().collect())
