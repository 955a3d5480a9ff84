"""Operators' requests to a cluster, over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.waiting import until
from penstock.core.cluster.devices import WorkerDevice
from penstock.core.cluster.manager_records import ManagerRecord
from penstock.features.admin.cluster_metrics import ClusterOverview
from penstock.features.admin.cluster_watch import ClusterWatch
from penstock.manager.control_plane import ControlPlane, now
from penstock.manager.manager import Manager
from penstock.manager.manager_server import serve_manager
from penstock.manager.term import BlockCount, BlocksReport, WorkerFacts, WorkerLoad
from penstock.manager.worker_liveness import WorkerArrived
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.encodings import decode_devices
from tests.managers import administration, make_manager
from tests.unit.features.admin.conftest import ManagedWorkers


class Cluster(ManagedWorkers):
    def __init__(self, manager: Manager, server: grpc.aio.Server, stub: Any, follower_stub: Any) -> None:
        self.manager, self.server, self.stub, self.follower_stub = manager, server, stub, follower_stub

    async def stop_leader(self) -> None:
        """Stop the leader's server while the leader keeps its lease."""
        await self.server.stop(None)

    async def blocks(self, model: str = "") -> dict[str, pb.BlockStatus]:
        return {each.block_id: each for each in (await self.stub.ListBlocks(pb.ListBlocksRequest(model=model))).blocks}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    for version in ("1", "2"):
        (tmp_path / "models" / "m" / version).mkdir(parents=True)
        (tmp_path / "models" / "m" / version / "model.onnx").write_bytes(b"never read here")
    (tmp_path / "models" / "m" / "model.yaml").write_text("task: tensor\n")
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    addresses = [f"unix:{tmp_path / name}" for name in ("first.sock", "second.sock")]
    first, second = managers = [
        make_manager(store, tmp_path / "models", ManagerRecord(manager_id=name, address=address), is_fresh=True)
        for name, address in zip(("first", "second"), addresses, strict=True)
    ]
    await first.start()
    await second.start(is_sole=False)
    await until(lambda: second.control.election.leader is not None and len(first.control.election.managers) == 2)
    servers = [
        await serve_manager(manager, address, services=[administration(manager)])
        for manager, address in zip(managers, addresses, strict=True)
    ]
    async with grpc.aio.insecure_channel(addresses[0]) as one, grpc.aio.insecure_channel(addresses[1]) as other:
        yield Cluster(first, servers[0], cluster_pb2_grpc.ClusterStub(one), cluster_pb2_grpc.ClusterStub(other))
    for server in servers:
        await server.stop(None)
    await second.close()
    await first.close()
    await store.close()


async def test_concurrent_changes_of_one_worker_are_all_made(cluster: Cluster) -> None:
    await cluster.join("w1")
    await asyncio.gather(
        cluster.stub.ChangeWorker(pb.ChangeWorkerRequest(worker_id="w1", changes='{"is_draining": true}'), timeout=5),
        cluster.stub.ChangeWorker(pb.ChangeWorkerRequest(worker_id="w1", changes='{"labels": {"a": "b"}}'), timeout=5),
        cluster.stub.ChangeWorker(pb.ChangeWorkerRequest(worker_id="w1", changes='{"labels": {"c": "d"}}'), timeout=5),
    )
    (worker,) = (await cluster.stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert (worker.is_draining, dict(worker.facts.labels)) == (True, {"a": "b", "c": "d"})


async def test_status_and_lists_show_the_cluster(cluster: Cluster) -> None:
    await cluster.join("w1", cpus=4.0, labels={"disk": "ssd"})
    device = WorkerDevice("cuda:0", "GPU-1", "H", 100, 60, None, 50, {"blk-m-2": 40})
    await cluster.work("w1", WorkerLoad(cpu=0.5, memory_bytes=7, jobs=1, devices=[device]))
    status = await cluster.stub.Status(pb.StatusRequest())
    assert (status.manager_id, status.is_leader, status.epoch) == ("first", True, cluster.manager.control.epoch)
    assert {each.manager_id: each.is_leader for each in status.managers} == {"first": True, "second": False}
    assert dict(status.workers) == {"alive": 1}
    assert dict(status.blocks) == {"ready": 1}
    (worker,) = (await cluster.stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert (worker.state, worker.facts.cpus, dict(worker.facts.labels)) == ("alive", 4.0, {"disk": "ssd"})
    assert (worker.load.cpu, worker.load.HasField("gpu"), len(worker.blocks)) == (0.5, False, 1)
    assert decode_devices(worker.load.devices) == [device]
    (block,) = (await cluster.blocks()).values()
    assert (block.spec.model, block.spec.version, block.role, block.state) == ("m", "2", "chosen", "ready")
    assert [holder.worker_id for holder in block.holders] == list(block.placed) == ["w1"]


async def test_counts_are_reported_per_worker_and_summed(cluster: Cluster) -> None:
    await cluster.join("w1")
    await cluster.join("w2")
    (block_id,) = await cluster.blocks()
    await cluster.work("w1", WorkerLoad(counts={block_id: BlockCount(3, 1, 0.5)}))
    await cluster.work("w1", WorkerLoad())
    await cluster.work("w2", WorkerLoad(counts={block_id: BlockCount(4, 0, 1.5)}))
    (block,) = (await cluster.blocks()).values()
    assert (block.requests, block.errors, block.latency_s) == (7, 1, 2.0)


async def test_a_block_is_deployed_scaled_explained_and_removed(cluster: Cluster) -> None:
    for worker in ("w1", "w2", "w3"):
        await cluster.join(worker)
    (old,) = await cluster.blocks()
    spec = pb.BlockSpec(model="m", version="1", replicas=1, labels={}, metadata=json.dumps({"team": "a"}), weight=2.0)
    deployed = await cluster.stub.DeployBlock(pb.DeployBlockRequest(spec=spec, is_beside=True))
    assert not deployed.HasField("failure"), deployed
    (new,) = deployed.block_ids
    block = (await cluster.blocks())[new]
    assert (len(block.placed), json.loads(block.spec.metadata), block.spec.weight) == (1, {"team": "a"}, 2.0)
    assert len((await cluster.blocks())[old].placed) == 3, "the earlier block has not changed"
    for worker in ("w1", "w2", "w3"):
        await cluster.work(worker)
    revision = block.revision
    await cluster.stub.ChangeBlock(pb.ChangeBlockRequest(block_id=new, changes='{"replicas": 2}'))
    block = (await cluster.blocks())[new]
    assert (len(block.placed), block.revision) == (2, revision), "no worker loads the block again"
    explained = await cluster.stub.ExplainBlock(pb.ExplainBlockRequest(block_id=new))
    assert "2 replicas" in explained.sentences[0]
    await cluster.stub.RemoveBlock(pb.RemoveBlockRequest(block_id=new))
    for worker in ("w1", "w2", "w3"):
        await cluster.work(worker)
    assert new not in await cluster.blocks()
    await until(lambda: bool(cluster.manager.control.events.read(kind="block_removed")))
    events = (await cluster.stub.Events(pb.EventsRequest(subject=new))).events
    assert [event.kind for event in events] == ["block_deployed", "block_scaled", "block_removed"]


async def test_a_block_can_replace_the_others_of_its_model(cluster: Cluster) -> None:
    await cluster.join("w1")
    (old,) = await cluster.blocks()
    deployed = await cluster.stub.DeployBlock(pb.DeployBlockRequest(spec=pb.BlockSpec(model="m", version="1")))
    (new,) = deployed.block_ids
    for _ in range(2):
        await cluster.work("w1")
    blocks = await cluster.blocks()
    assert {name: blocks[name].state for name in (old, new)} == {old: "unloaded", new: "ready"}


async def test_the_last_block_of_a_folder_stays_unloaded_after_repeated_removal(cluster: Cluster) -> None:
    (block_id,) = await cluster.blocks()
    for _ in range(2):
        await cluster.stub.RemoveBlock(pb.RemoveBlockRequest(block_id=block_id))
        assert cluster.manager.control.desired.is_unloaded("m"), "the folder does not bring the block back"


async def test_a_drained_workers_blocks_move_to_others(cluster: Cluster) -> None:
    await cluster.join("w1")
    await cluster.join("w2")
    spec = pb.BlockSpec(model="m", version="1", replicas=1, labels={"worker": "w1"})
    deployed = await cluster.stub.DeployBlock(pb.DeployBlockRequest(spec=spec, is_beside=True))
    (pinned,) = deployed.block_ids
    await cluster.work("w1")
    await cluster.stub.ChangeWorker(pb.ChangeWorkerRequest(worker_id="w1", changes='{"is_draining": true}'))
    blocks = await cluster.blocks()
    assert [list(block.placed) for name, block in blocks.items() if name != pinned] == [["w2"]]
    assert list(blocks[pinned].placed) == []
    assert [holder.worker_id for holder in blocks[pinned].holders] == ["w1"], "no other worker may hold the block"
    await cluster.stub.ChangeWorker(pb.ChangeWorkerRequest(worker_id="w1", changes='{"is_draining": false}'))
    assert list((await cluster.blocks())[pinned].placed) == ["w1"]


async def test_a_removed_worker_is_forgotten_and_its_process_refused(cluster: Cluster) -> None:
    await cluster.join("w1")
    await cluster.join("w2")
    await cluster.stub.RemoveWorker(pb.RemoveWorkerRequest(worker_id="w1"))
    workers = (await cluster.stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert {each.worker_id: each.is_removed for each in workers} == {"w1": True, "w2": False}
    term = cluster.manager.control.term
    term.worker_joined(WorkerArrived("w1", "1-life", 8), WorkerFacts(), BlocksReport([]), now())
    assert "removed" in term.refused[8].reason
    term.worker_joined(WorkerArrived("w1", "2-life", 9), WorkerFacts(), BlocksReport([]), now())
    assert 9 not in term.refused


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("RemoveWorker", pb.RemoveWorkerRequest(worker_id="nobody"), "not_found"),
        ("ChangeWorker", pb.ChangeWorkerRequest(worker_id="nobody", changes='{"is_draining": true}'), "not_found"),
        ("RemoveBlock", pb.RemoveBlockRequest(block_id="blk-none"), "unknown_model"),
        ("ChangeBlock", pb.ChangeBlockRequest(block_id="blk-none", changes='{"replicas": 1}'), "unknown_model"),
        ("ExplainBlock", pb.ExplainBlockRequest(block_id="blk-none"), "unknown_model"),
        ("DeployBlock", pb.DeployBlockRequest(spec=pb.BlockSpec(model="nobody")), "unknown_model"),
        ("DeployBlock", pb.DeployBlockRequest(spec=pb.BlockSpec(model="m", metadata="no JSON")), "invalid_request"),
        ("DeployBlock", pb.DeployBlockRequest(spec=pb.BlockSpec(model="m", cpu=-1)), "invalid_request"),
    ],
)
async def test_invalid_requests_have_their_error_code(cluster: Cluster, method: str, request_: Any, code: str) -> None:
    answer = await getattr(cluster.stub, method)(request_)
    assert answer.failure.code == code, answer


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (pb.BlockSpec(model="m", cpu=-1), "cpu: must be greater than or equal to 0"),
        (pb.BlockSpec(model="m", weight=float("inf")), "weight: must be a finite number"),
        (pb.BlockSpec(model="m", metadata="[1]"), "metadata: must be a mapping, such as {key: value}"),
        (
            pb.BlockSpec(model="m", metadata="no"),
            "its metadata is not valid JSON: Expecting value: line 1 column 1 (char 0)",
        ),
    ],
)
async def test_a_fault_of_a_block_is_described_in_one_sentence(
    cluster: Cluster, spec: pb.BlockSpec, message: str
) -> None:
    answer = await cluster.stub.DeployBlock(pb.DeployBlockRequest(spec=spec))
    assert answer.failure.message == f"the block cannot be deployed: {message}"


async def test_a_manager_that_lost_its_term_is_not_reported_as_the_leader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlPlane, "epoch", 0)
    for stub in (cluster.stub, cluster.follower_stub):
        status = await stub.Status(pb.StatusRequest())
        assert (status.leader, [each.manager_id for each in status.managers if each.is_leader]) == ("", [])


async def test_a_follower_reads_and_names_the_leader(cluster: Cluster) -> None:
    await cluster.join("w1")
    stub = cluster.follower_stub
    status = await stub.Status(pb.StatusRequest())
    assert (status.manager_id, status.is_leader, status.leader.endswith("first.sock")) == ("second", False, True)
    assert dict(status.workers) == {"alive": 1}, "the follower asks the leader"
    (block,) = (await stub.ListBlocks(pb.ListBlocksRequest())).blocks
    assert (block.spec.model, block.state) == ("m", "ready")
    assert [each.worker_id for each in (await stub.ListWorkers(pb.ListWorkersRequest())).workers] == ["w1"]
    explained = await stub.ExplainBlock(pb.ExplainBlockRequest(block_id=block.block_id))
    assert "w1" in " ".join(explained.sentences)
    answer = await stub.ChangeBlock(pb.ChangeBlockRequest(block_id=block.block_id, changes='{"replicas": 1}'))
    assert answer.failure.code == "not_leader"
    assert answer.failure.fields["leader"].endswith("first.sock")


async def test_a_follower_answers_from_the_store_while_the_leader_does_not(cluster: Cluster) -> None:
    await cluster.join("w1")
    await cluster.stop_leader()
    stub = cluster.follower_stub
    (block,) = (await stub.ListBlocks(pb.ListBlocksRequest())).blocks
    assert (block.spec.model, block.state) == ("m", "unknown")
    explained = await stub.ExplainBlock(pb.ExplainBlockRequest(block_id=block.block_id))
    assert explained.failure.code == "not_leader"


async def test_a_block_that_no_worker_can_hold_is_reported(cluster: Cluster) -> None:
    await cluster.join("w1")
    spec = pb.BlockSpec(model="m", version="1", replicas=1, labels={"disk": "none has it"})
    answer = await cluster.stub.DeployBlock(pb.DeployBlockRequest(spec=spec, is_beside=True, wait_s=0.05))
    assert answer.failure.code == "model_not_ready"
    assert f"penstock block explain {answer.block_ids[0]}" in answer.failure.message
    (sentence,) = [
        each
        for each in (await cluster.stub.ExplainBlock(pb.ExplainBlockRequest(block_id=answer.block_ids[0]))).sentences
        if "w1" in each
    ]
    assert "disk" in sentence


async def test_changes_with_an_outdated_revision_are_refused(cluster: Cluster) -> None:
    await cluster.join("w1", labels={"disk": "ssd"})
    (block,) = [each for each in (await cluster.blocks()).values() if each.role == "chosen"]

    def change(changes: str, tag: str) -> Any:
        return cluster.stub.ChangeBlock(
            pb.ChangeBlockRequest(block_id=block.block_id, changes=changes, expected=tag), timeout=5
        )

    changed = (await change('{"replicas": 1, "metadata": {"team": "a"}, "cpu": 0.5}', block.etag)).block
    assert (changed.spec.replicas, json.loads(changed.spec.metadata), changed.spec.cpu) == (1, {"team": "a"}, 0.5)
    assert changed.revision == block.revision, "no worker loads the block again"
    assert (await change('{"replicas": 2}', block.etag)).failure.code == "precondition_failed"
    removal = pb.RemoveBlockRequest(block_id=block.block_id, expected=block.etag)
    assert (await cluster.stub.RemoveBlock(removal, timeout=5)).failure.code == "precondition_failed"
    back = (await change('{"metadata": null, "cpu": null}', f'"0-old", "{changed.etag}"')).block
    assert (back.spec.replicas, back.spec.metadata, back.spec.cpu) == (1, "", 0.0)
    assert (await change('{"model": "other"}', "")).failure.code == "invalid_request"

    worker = (await cluster.stub.ListWorkers(pb.ListWorkersRequest(worker_id="w1"))).workers[0]
    labelled = pb.ChangeWorkerRequest(
        worker_id="w1", changes='{"labels": {"a": "b", "disk": "hdd"}}', expected=worker.etag
    )
    told = (await cluster.stub.ChangeWorker(labelled, timeout=5)).worker
    assert dict(told.facts.labels) == {"a": "b", "disk": "hdd"}
    assert (await cluster.stub.ChangeWorker(labelled, timeout=5)).failure.code == "precondition_failed"
    await cluster.work("w1", WorkerLoad(cpu=3.0))
    again = (await cluster.stub.ListWorkers(pb.ListWorkersRequest(worker_id="w1"))).workers[0]
    assert again.etag == told.etag, "figures do not change the ETag"
    unlabelled = pb.ChangeWorkerRequest(worker_id="w1", changes='{"labels": {"disk": null}, "is_draining": true}')
    told = (await cluster.stub.ChangeWorker(unlabelled, timeout=5)).worker
    assert (dict(told.facts.labels), told.is_draining) == ({"a": "b", "disk": "ssd"}, True)
    unknown = (await cluster.stub.ListWorkers(pb.ListWorkersRequest(worker_id="w9"))).failure.code
    assert unknown == "not_found"


async def test_a_watch_sends_everything_once_and_then_changes(cluster: Cluster) -> None:
    stream = cluster.stub.WatchCluster(pb.WatchClusterRequest(kinds=["blocks", "workers", "events"]), timeout=10)
    first = await stream.read()
    assert (first.is_snapshot, {block.spec.model for block in first.blocks}) == (True, {"m"})
    await cluster.join("w1")
    kinds: set[str] = set()
    while not {"w1", "worker_alive"} <= kinds:
        change = await stream.read()
        assert not change.is_snapshot
        assert change.revision > first.revision
        kinds |= {worker.worker_id for worker in change.workers} | {event.kind for event in change.events}
    await cluster.stub.RemoveWorker(pb.RemoveWorkerRequest(worker_id="w1"), timeout=5)
    stream.cancel()
    refused = [
        cluster.follower_stub.WatchCluster(pb.WatchClusterRequest(), timeout=5),
        cluster.stub.WatchCluster(pb.WatchClusterRequest(kinds=["secrets"]), timeout=5),
    ]
    codes = [await call.code() for call in refused]
    assert codes == [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT]
    metrics = cluster.stub.WatchCluster(pb.WatchClusterRequest(kinds=["metrics"]), timeout=5)
    assert (await metrics.read()).is_snapshot
    metrics.cancel()


async def test_a_slow_watcher_gets_many_changes_as_one(cluster: Cluster) -> None:
    watch = ClusterWatch(cluster.manager.control, ClusterOverview(cluster.manager.control), {})
    changes = watch.watch_changes(("workers",))
    first = await anext(changes)
    for number in range(1, 30):
        await cluster.join(f"w{number}")
        await watch._update()
    told = await anext(changes)
    assert (first.is_snapshot, told.is_snapshot, len(told.workers)) == (True, False, 29)
    await changes.aclose()
    assert watch._updating is None, "without watchers there is no update"


async def test_events_are_read_back_from_the_newest(cluster: Cluster) -> None:
    for subject in "abc":
        cluster.manager.control.events.emit("test", subject, "")
    await until(lambda: len(cluster.manager.control.events.read(kind="test")) == 3)
    pages, before = [], 0
    while page := (await cluster.stub.Events(pb.EventsRequest(kind="test", limit=1, before=before))).events:
        before = page[0].number
        pages.append(page[0].subject)
    assert pages == ["c", "b", "a"]
