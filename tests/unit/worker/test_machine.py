"""What a worker tells of its machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.cluster.devices import WorkerDevice
from penstock.core.config import WorkerSettings
from penstock.telemetry.devices import Gpus
from penstock.wire.forms import decode_devices
from penstock.worker.machine import Machine, OnDevice, find_siblings
from tests.nvml import GIB, FakeGpu, FakeNvml


def test_a_worker_tells_what_it_may_use_and_what_it_shares() -> None:
    settings = WorkerSettings(weights={"worker-1": 3}, zones={"h1.worker-1": "east"}, memory_budget_bytes=4096)
    facts = [Machine(f"h1.worker-{number}", "h1", settings).facts() for number in range(2)]
    assert [(each.weight, each.zone, each.memory_bytes) for each in facts] == [(1.0, "", 4096), (3.0, "east", 4096)]
    assert facts[0].shared == facts[1].shared
    assert facts[0].shared[0].memory_bytes > 4096
    assert 0 < facts[0].cpus <= facts[0].shared[0].cpus
    other = Machine("h2.worker-0", "h2", settings).facts()
    assert not {each.name for each in other.shared} & {each.name for each in facts[0].shared}


def test_the_processes_that_it_started_count_as_its_own() -> None:
    machine = Machine("w", "n", WorkerSettings())
    before = machine.memory_bytes
    program = "kept = b'x' * (64 * 2**20)\nfor _ in range(10**6): pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        machine.look()
        assert machine.memory_bytes - before > 60 * 2**20
        load = machine.load()
        assert load.memory_bytes == machine.memory_bytes
        assert load.cpu > 0
        assert not load.devices
        assert not load.HasField("gpu")
        child.kill()
    machine.look()
    assert machine.memory_bytes - before < 60 * 2**20


def test_each_gpu_is_told_with_what_the_worker_and_its_blocks_have_of_it() -> None:
    first, second = FakeGpu(used=3 * GIB, busy=40, processes={os.getpid(): GIB, 1: GIB}), FakeGpu(busy=20)
    machine = Machine("w", "n", WorkerSettings(), gpus=Gpus(FakeNvml(first, second)))
    assert machine.facts().gpu_memory_bytes == 16 * GIB
    blocks = [OnDevice("blk-a", "cuda", GIB), OnDevice("blk-b", "cuda:0", 5), OnDevice("blk-c", "mps", 7)]
    name = "NVIDIA Imagined"
    assert machine.devices(blocks) == [
        WorkerDevice("cuda:0", "GPU-0", name, 8 * GIB, 3 * GIB, 0.4, GIB, {"blk-a": GIB, "blk-b": 5}),
        WorkerDevice("cuda:1", "GPU-1", name, 8 * GIB, 0, 0.2, None, {}),
    ]
    load = machine.load(blocks)
    assert load.gpu == pytest.approx(0.3)
    assert load.gpu_memory_bytes == 3 * GIB
    assert decode_devices(load.devices) == machine.devices(blocks)
    second.is_lost = True
    machine.look()
    assert [device.uuid for device in machine.devices(())] == ["GPU-0"]


@pytest.mark.parametrize(
    ("told", "siblings"),
    [("0-1\n", {0, 1}), ("0,64\n", {0, 64}), ("0-1,64-65", {0, 1, 64, 65}), ("", {0}), (None, {0})],
)
def test_processors_that_share_a_core_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, siblings: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    if told is not None:
        (tmp_path / "cpu0/topology").mkdir(parents=True)
        (tmp_path / "cpu0/topology/thread_siblings_list").write_text(told)
    assert find_siblings(tmp_path) == {0: siblings}
