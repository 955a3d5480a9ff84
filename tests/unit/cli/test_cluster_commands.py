"""The commands that call a cluster's managers, against managers that answer as the test says."""

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from benchmarks.waiting import eventually
from penstock.cli import main as cli
from penstock.client.cluster import ClusterClient
from penstock.core.cluster.manager_records import MANAGERS_PREFIX, ManagerRecord
from penstock.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotReady,
    NotLeader,
    PenstockError,
    Unavailable,
    UnknownModel,
)
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc, manager_pb2
from penstock.storage.metadata.opening import open_metadata
from penstock.terminal import manager_options as asking
from penstock.terminal.server_options import read_managers
from penstock.wire.failures import encode_failure

GIB = 2**30


class FakeManager(cluster_pb2_grpc.ClusterServicer):
    """A manager with scripted answers; if `leader` is set, it refuses writes and names that leader."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.leader: str | None = None
        self.failure: PenstockError | None = None
        self.workers = [
            pb.WorkerStatus(
                worker_id="n1.worker-0",
                state="alive",
                facts=manager_pb2.WorkerFacts(
                    node="n1", zone="east", cpus=8, memory_bytes=16 * GIB, labels={"ssd": ""}
                ),
                load=manager_pb2.WorkerLoad(cpu=1.5, memory_bytes=GIB, jobs=3),
                blocks=[manager_pb2.BlockState(block_id="blk-1", state="ready")],
            ),
            pb.WorkerStatus(worker_id="n2.worker-0", state="suspect", silent_s=3.2, is_draining=True),
        ]
        self.blocks = [
            pb.BlockStatus(
                block_id="blk-1",
                spec=pb.BlockSpec(model="m", version="1", replicas=2, metadata='{"team": "a"}'),
                role="chosen",
                state="ready",
                holders=[pb.BlockHolder(worker_id="n1.worker-0", state="ready", is_serving=True)],
                placed=["n1.worker-0"],
                requests=10,
                errors=1,
                latency_s=0.05,
            ),
            pb.BlockStatus(block_id="blk-2", spec=pb.BlockSpec(model="m", version="2"), role="chosen", state="failed"),
        ]
        self.server = grpc.server(ThreadPoolExecutor(2))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _answer(self, request: Any, answer: Any, is_write: bool = False) -> Any:
        self.asked.append(request)
        failure = self.failure
        if is_write and self.leader is not None:
            failure = NotLeader("another manager leads", leader=self.leader)
        if failure is not None:
            answer.failure.CopyFrom(encode_failure(failure))
        return answer

    def Status(self, request: Any, context: Any) -> Any:
        managers = [pb.ManagerStatus(manager_id="m1", address=self.address, is_leader=True)]
        answer = pb.StatusResponse(
            manager_id="m1",
            leader=self.address if self.leader is None else self.leader,
            epoch=7,
            revision=99,
            managers=managers,
            workers={"alive": 2, "offline": 0},
        )
        return self._answer(request, answer)

    def ListWorkers(self, request: Any, context: Any) -> Any:
        return self._answer(request, pb.ListWorkersResponse(workers=self.workers))

    def ListBlocks(self, request: Any, context: Any) -> Any:
        return self._answer(request, pb.ListBlocksResponse(blocks=self.blocks))

    def ChangeWorker(self, request: Any, context: Any) -> Any:
        del self.workers[0].blocks[:]
        return self._answer(request, pb.WorkerResponse(), is_write=True)

    def RemoveWorker(self, request: Any, context: Any) -> Any:
        return self._answer(request, pb.RemoveWorkerResponse(), is_write=True)

    def DeployBlock(self, request: Any, context: Any) -> Any:
        return self._answer(request, pb.DeployBlockResponse(block_ids=["blk-9"]), is_write=True)

    def ChangeBlock(self, request: Any, context: Any) -> Any:
        return self._answer(request, pb.BlockResponse(), is_write=True)

    def RemoveBlock(self, request: Any, context: Any) -> Any:
        return self._answer(request, pb.RemoveBlockResponse(), is_write=True)

    def ExplainBlock(self, request: Any, context: Any) -> Any:
        return self._answer(request, pb.ExplainBlockResponse(sentences=["It is there.", "It is not \x1b[31m here."]))

    def Events(self, request: Any, context: Any) -> Any:
        events = [pb.ClusterEvent(number=3, at=0.0, kind="worker_offline", subject="n2.worker-0", text="silent")]
        return self._answer(request, pb.EventsResponse(events=[e for e in events if e.number > request.after]))


@pytest.fixture
def managers() -> Iterator[list[FakeManager]]:
    found = [FakeManager(), FakeManager()]
    yield found
    for each in found:
        each.server.stop(None)


@pytest.fixture
def manager(managers: list[FakeManager]) -> FakeManager:
    return managers[0]


def ask(manager: FakeManager | str, *arguments: str) -> Result:
    address = manager if isinstance(manager, str) else manager.address
    return CliRunner().invoke(cli.app, [*arguments, "--server", address], env={"COLUMNS": "200"})


def values(manager: FakeManager, *arguments: str) -> Any:
    return json.loads(ask(manager, *arguments, "--json").stdout)


def test_the_cluster_is_shown_as_tables_and_as_json(manager: FakeManager) -> None:
    shown = ask(manager, "cluster", "status").output
    for expected in (
        f"led by {manager.address}, epoch 7, revision 99",
        "m1",
        "no gateway is connected",
        "workers: 2 alive",
        "none",
    ):
        assert expected in shown
    assert values(manager, "cluster", "status")["managers"][0] == {
        "manager_id": "m1",
        "address": manager.address,
        "is_leader": True,
    }


def test_workers_are_shown(manager: FakeManager) -> None:
    first, second = (line for line in ask(manager, "worker", "list").output.splitlines() if ".worker-0" in line)
    for expected in ("alive", "n1", "east", "1.5 of 8", "1.0 GiB of 16.0 GiB", "ssd"):
        assert expected in first
    assert "suspect for 3 s, draining" in second
    assert values(manager, "worker", "list")[0]["facts"]["memory_bytes"] == 16 * GIB
    assert values(manager, "worker", "list")[0]["load"]["gpu"] is None


def test_draining_waits_until_the_worker_holds_nothing(manager: FakeManager) -> None:
    assert "has no more blocks" in ask(manager, "worker", "drain", "n1.worker-0").output
    assert pb.ChangeWorkerRequest(worker_id="n1.worker-0", changes='{"is_draining": true}') in manager.asked
    assert "is no longer draining" in ask(manager, "worker", "drain", "n1.worker-0", "--undo").output


def test_a_drained_worker_leaves_if_requested(manager: FakeManager) -> None:
    assert values(manager, "worker", "drain", "n1.worker-0", "--leave")["has_left"]
    assert manager.asked[-1] == pb.RemoveWorkerRequest(worker_id="n1.worker-0")


def test_draining_reports_blocks_that_cannot_move(manager: FakeManager) -> None:
    manager.workers[1].blocks.add(block_id="blk-2")
    error = ask(manager, "worker", "drain", "n2.worker-0", "--wait", "0.1").exception
    assert isinstance(error, DeadlineExceeded)
    assert "penstock block explain blk-2" in error.message


def test_a_worker_with_blocks_is_removed_only_by_force(manager: FakeManager) -> None:
    error = ask(manager, "worker", "remove", "n1.worker-0").exception
    assert isinstance(error, InvalidRequest)
    assert "drain it first" in error.message
    assert ask(manager, "worker", "remove", "n1.worker-0", "--force").exit_code == 0
    assert ask(manager, "worker", "remove", "n2.worker-0").exit_code == 0


def test_blocks_are_shown(manager: FakeManager) -> None:
    line = next(line for line in ask(manager, "block", "list").output.splitlines() if "blk-1" in line)
    cells = re.split(r"\s{2,}", line.strip())
    assert cells == ["blk-1", "m", "1", "ready", "1 of 2", "n1.worker-0", "10", "1", "5.0"]
    assert values(manager, "block", "list")[0]["spec"]["metadata"] == {"team": "a"}


def test_a_block_is_deployed_with_the_described_settings(manager: FakeManager) -> None:
    described = ("--replicas", "2", "--cpu", "0.5", "--memory", "1.5GiB", "--gpu-memory", "512 MiB", "--label", "ssd")
    more = ("--label", "tier=gold", "--anti-affinity", "big", "--metadata", "team=a", "--metadata", 'n={"x": 1}')
    made = values(manager, "block", "deploy", "m:3", *described, *more, "--weight", "2", "--beside", "--wait", "1")
    assert made == {"block_ids": ["blk-9"]}
    request = manager.asked[-1]
    spec = request.spec
    assert (spec.model, spec.version, spec.replicas, spec.cpu, spec.weight) == ("m", "3", 2, 0.5, 2)
    assert (spec.memory_bytes, spec.gpu_memory_bytes) == (3 * GIB // 2, GIB // 2)
    assert dict(spec.labels) == {"ssd": "", "tier": "gold"}
    assert list(spec.anti_affinity) == ["big"]
    assert json.loads(spec.metadata) == {"team": "a", "n": {"x": 1}}
    assert (request.is_beside, request.wait_s) == (True, 1.0)


@pytest.mark.parametrize(
    "flags", [("--memory", "much"), ("--memory", "-1"), ("--memory", "1e30"), ("--label", "=x"), ("--metadata", "x")]
)
def test_unreadable_values_are_reported(manager: FakeManager, flags: tuple[str, str]) -> None:
    error = ask(manager, "block", "deploy", "m", *flags).exception
    assert isinstance(error, InvalidRequest)
    assert flags[0] in error.message


def test_too_large_replica_counts_are_reported(manager: FakeManager) -> None:
    scaled = ask(manager, "block", "scale", "blk-1", "99999999999")
    assert (scaled.exit_code, isinstance(scaled.exception, SystemExit)) == (2, True)


def test_a_waiting_command_reports_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "SILENT_S", 0.0)
    with asking.print_if_slow("waiting for workers"):
        eventually(lambda: "waiting for workers" in capsys.readouterr().err, "it says so")


def test_blocks_are_found_by_id_or_by_model(manager: FakeManager) -> None:
    assert values(manager, "block", "scale", "blk-2", "3") == {"block_id": "blk-2", "replicas": 3}
    assert values(manager, "block", "scale", "m:1", "0") == {"block_id": "blk-1", "replicas": 0}
    assert isinstance(ask(manager, "block", "scale", "m", "3").exception, InvalidRequest)  # two blocks match
    manager.blocks[1].role = "spare"
    assert values(manager, "block", "remove", "m") == {"block_id": "blk-1"}
    assert isinstance(ask(manager, "block", "remove", "other").exception, UnknownModel)


def test_an_explanation_is_printed_without_terminal_control_characters(manager: FakeManager) -> None:
    shown = ask(manager, "block", "explain", "blk-1").output
    assert shown.splitlines()[0] == "It is there."
    assert "\x1b" not in shown
    assert values(manager, "block", "explain", "blk-1")["sentences"][0] == "It is there."


def test_events_are_printed_one_per_line(manager: FakeManager) -> None:
    assert "worker_offline  n2.worker-0  silent" in ask(manager, "events").output
    assert values(manager, "events", "--kind", "x")[0]["number"] == 3
    assert manager.asked[-1].kind == "x"


def test_writes_are_sent_to_the_leader(managers: list[FakeManager]) -> None:
    managers[0].leader = managers[1].address
    assert ask(managers[0], "block", "scale", "blk-1", "3").exit_code == 0
    assert managers[1].asked[-1] == pb.ChangeBlockRequest(block_id="blk-1", changes='{"replicas": 3}')


def test_the_leader_is_found_after_it_changed(managers: list[FakeManager]) -> None:
    client = ClusterClient([managers[0].address])
    managers[0].leader = managers[1].address
    with client:
        client.call("ChangeBlock", pb.ChangeBlockRequest(block_id="blk-1"))
    assert managers[1].asked == [pb.ChangeBlockRequest(block_id="blk-1")]


def test_writes_are_retried_until_the_timeout_while_nobody_leads(manager: FakeManager) -> None:
    manager.leader = ""
    error = ask(manager, "block", "scale", "blk-1", "3", "--timeout", "0.8").exception
    assert isinstance(error, NotLeader)
    assert len([request for request in manager.asked if isinstance(request, pb.ChangeBlockRequest)]) > 1


def test_an_unreachable_manager_is_skipped(managers: list[FakeManager]) -> None:
    managers[0].server.stop(None).wait()
    both = f"{managers[0].address},{managers[1].address}"
    assert ask(both, "worker", "list").exit_code == 0
    managers[1].server.stop(None).wait()
    error = ask(both, "worker", "list").exception
    assert isinstance(error, Unavailable)
    assert "--server" in error.message


def test_the_blocks_of_a_large_cluster_fit_one_answer(manager: FakeManager) -> None:
    manager.blocks = [pb.BlockStatus(spec=pb.BlockSpec(source="x" * 2**20)) for _ in range(5)]
    assert len(values(manager, "block", "list")) == 5


def test_a_deployment_that_fails_is_not_repeated(manager: FakeManager) -> None:
    manager.failure = ModelNotReady("it is not on every worker")
    with pytest.raises(ModelNotReady):
        ClusterClient([manager.address]).call("DeployBlock", pb.DeployBlockRequest())
    assert len(manager.asked) == 1


def test_a_failure_is_shown_as_the_managers_error(manager: FakeManager) -> None:
    manager.failure = UnknownModel("no such block")
    assert isinstance(ask(manager, "block", "explain", "blk-1").exception, UnknownModel)


def test_the_managers_are_found_in_their_store(manager: FakeManager, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/metadata.db"
    with pytest.raises(Unavailable, match="no manager is running"):
        read_managers(url)

    async def write() -> None:
        store = await open_metadata(url, tmp_path)
        record = ManagerRecord(manager_id="m1", address=manager.address)
        await store.put(f"{MANAGERS_PREFIX}m1", record.model_dump_json().encode())
        await store.close()

    asyncio.run(write())
    assert ask(url, "worker", "list").exit_code == 0


def test_without_managers_on_the_command_line_the_setting_is_used(
    manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CLUSTER__JOIN", manager.address)
    assert CliRunner().invoke(cli.app, ["worker", "list", "--json"]).exit_code == 0
    assert manager.asked
