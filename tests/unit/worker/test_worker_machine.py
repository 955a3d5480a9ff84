"""A worker's report of its machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.cluster.devices import WorkerDevice
from penstock.core.config import WorkerSettings
from penstock.telemetry.gpus import Gpus
from penstock.telemetry.metrics import WorkerMetrics
from penstock.wire.encodings import decode_devices
from penstock.worker.worker_machine import BlockGpuMemory, DeviceGauges, Machine, find_siblings
from tests.nvml import GIB, FakeGpu, FakeNvml


def test_a_worker_reports_its_limits_and_its_shared_resources() -> None:
    settings = WorkerSettings(weights={"worker-1": 3}, zone="east", memory_budget_bytes=4096)
    facts = [Machine(f"h1.worker-{number}", "h1", settings).facts() for number in range(2)]
    assert [(each.weight, each.zone, each.memory_bytes) for each in facts] == [(1.0, "east", 4096), (3.0, "east", 4096)]
    assert facts[0].shared == facts[1].shared
    assert facts[0].shared[0].memory_bytes > 4096
    assert 0 < facts[0].cpus <= facts[0].shared[0].cpus
    other = Machine("h2.worker-0", "h2", settings).facts()
    assert not {each.name for each in other.shared} & {each.name for each in facts[0].shared}


def test_child_processes_count_as_the_workers_own() -> None:
    machine = Machine("w", "n", WorkerSettings())
    before = machine.memory_bytes
    program = "kept = b'x' * (64 * 2**20)\nfor _ in range(10**6): pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        machine.measure()
        assert machine.memory_bytes - before > 60 * 2**20
        load = machine.load()
        assert load.memory_bytes == machine.memory_bytes
        assert load.cpu > 0
        assert not load.devices
        assert not load.HasField("gpu")
        child.kill()
    machine.measure()
    assert machine.memory_bytes - before < 60 * 2**20


def test_each_gpu_is_reported_with_the_memory_of_the_worker_and_its_blocks() -> None:
    first, second = FakeGpu(used=3 * GIB, busy=40, processes={os.getpid(): GIB, 1: GIB}), FakeGpu(busy=20)
    machine = Machine("w", "n", WorkerSettings(), gpus=Gpus(FakeNvml(first, second)))
    assert machine.facts().gpu_memory_bytes == 16 * GIB
    blocks = [
        BlockGpuMemory("blk-a", "cuda", GIB),
        BlockGpuMemory("blk-b", "cuda:0", 5),
        BlockGpuMemory("blk-c", "mps", 7),
    ]
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
    machine.measure()
    assert [device.uuid for device in machine.devices(())] == ["GPU-0"]


@pytest.mark.parametrize(
    ("told", "siblings"),
    [("0-1\n", {0, 1}), ("0,64\n", {0, 64}), ("0-1,64-65", {0, 1, 64, 65}), ("", {0}), (None, {0})],
)
def test_hyperthreads_of_one_core_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, siblings: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    if told is not None:
        (tmp_path / "cpu0/topology").mkdir(parents=True)
        (tmp_path / "cpu0/topology/thread_siblings_list").write_text(told)
    assert find_siblings(tmp_path) == {0: siblings}


def test_metrics_show_devices_and_their_blocks_until_they_are_gone() -> None:
    registry = CollectorRegistry()
    gauges = DeviceGauges(WorkerMetrics(registry), "worker-0")

    def value(metric: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"penstock_{metric}", {"uuid": "GPU-1", **labels})

    gauges.set_gauges([WorkerDevice("cuda:0", "GPU-1", "H", 100, 60, 0.5, 30, {"blk-m": 20})], {"blk-m": ("m", "1")})
    assert [value("device_memory_bytes", gpu="H", kind=kind) for kind in ("all", "used")] == [100, 60]
    assert value("device_busy", gpu="H") == 0.5
    assert value("worker_device_memory_bytes", worker="worker-0") == 30
    assert value("block_device_memory_bytes", model="m", version="1") == 20
    gauges.set_gauges([WorkerDevice("cuda:0", "GPU-1", "H", 100, 40)], {})
    assert value("block_device_memory_bytes", model="m", version="1") == 0
    assert value("device_memory_bytes", gpu="H", kind="used") == 40
