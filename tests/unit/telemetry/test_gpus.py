"""GPUs as the driver reports them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.telemetry.gpus import Gpus, list_visible_gpus
from tests.nvml import GIB, HAS_COMPILER, FakeGpu, FakeNvml, make_stub_environment

SAY = """
import sys
from penstock.telemetry.gpus import open_gpus
gpus = open_gpus()
print([(g.device, g.uuid, g.name, g.memory_bytes) for g in gpus.visible])
print([gpus.read(g) for g in gpus.visible], [gpus.read_free_bytes(g) for g in gpus.visible])
print("pynvml" in sys.modules)
"""


def say(**environment: str) -> list[str]:
    told = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        [sys.executable, "-c", SAY], env=told, text=True, capture_output=True, check=True
    ).stdout.splitlines()


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")
def test_the_drivers_own_binding_reads_its_library(tmp_path: Path) -> None:
    gpus, readings, _ = say(**make_stub_environment(tmp_path), CUDA_VISIBLE_DEVICES="1,GPU-a")
    assert gpus == "[('cuda:0', 'GPU-b', 'Stub', 1000), ('cuda:1', 'GPU-a', 'Stub', 1000)]"
    assert readings == (
        "[GpuReading(used_bytes=700, free_bytes=300, busy_share=None, processes={}), "
        "GpuReading(used_bytes=700, free_bytes=300, busy_share=0.42, processes={11: 250})] [300, 300]"
    )


def test_without_a_driver_there_are_no_gpus_and_nothing_is_imported() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there is a driver")
    assert say() == ["[]", "[] []", "False"]


def test_visible_gpus_are_numbered_like_cuda() -> None:
    first, second = FakeGpu(used=GIB, busy=50), FakeGpu(24 * GIB, 3 * GIB, None, {7: GIB, 8: None, 9: GIB})
    gpus = Gpus(FakeNvml(first, second), "1,0")
    assert [(gpu.device, gpu.uuid) for gpu in gpus.visible] == [("cuda:0", "GPU-1"), ("cuda:1", "GPU-0")]
    assert gpus.list_shared_memory() == {"gpus": 32 * GIB, "gpus/1,0": 32 * GIB}
    assert [gpus.find(device) for device in ("cuda", "cuda:1", "cuda:2", "cpu", "mps", "auto")] == [
        *gpus.visible,
        *[None] * 4,
    ]
    reading = gpus.read(gpus.visible[0])
    assert reading is not None
    assert (reading.used_bytes, reading.free_bytes, reading.busy_share) == (3 * GIB, 21 * GIB, None)
    assert [reading.sum_process_bytes(pids) for pids in ({7}, {7, 9}, {8}, {1})] == [GIB, 2 * GIB, None, None]
    second.is_lost = True
    assert gpus.read(gpus.visible[0]) is None
    assert gpus.read_free_bytes(gpus.visible[0]) is None
    assert gpus.memory_bytes == 32 * GIB


@pytest.mark.parametrize(
    ("shown", "found"),
    [(None, [0, 1]), ("", []), ("1", [1]), ("1,0", [1, 0]), ("GPU-b", [1]), ("0,7,1", [0]), ("GPU-none", [])],
)
def test_only_gpus_that_cuda_shows_count(shown: str | None, found: list[int]) -> None:
    assert list_visible_gpus(["GPU-a1", "GPU-b2"], shown) == found
