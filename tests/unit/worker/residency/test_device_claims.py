"""Workers that load onto one GPU reserve the memory that others are about to take."""

import os
import subprocess
import sys
from pathlib import Path

from penstock.telemetry.gpus import Gpus
from penstock.worker.residency.device_claims import UNKNOWN, DeviceClaims
from tests.nvml import FakeGpu, FakeNvml

# Another process that loads as long as its standard input is open.
OTHER = """
import sys
from pathlib import Path
from penstock.telemetry.gpus import Gpus
from penstock.worker.residency.device_claims import DeviceClaims
from tests.nvml import FakeGpu, FakeNvml
claims = DeviceClaims(Gpus(FakeNvml(FakeGpu(1000))), Path(sys.argv[1]))
print(claims.claim("cuda:0", int(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def test_memory_of_another_process_that_loads_is_not_free_until_it_ends(tmp_path: Path) -> None:
    gpu = FakeGpu(1000, 100)
    mine = DeviceClaims(Gpus(FakeNvml(gpu)), tmp_path / "claims")
    assert mine.free_room("cuda:0").free_bytes == 900
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path / "claims"), "600"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        assert mine.free_room("cuda:0").free_bytes == 300
        assert not mine.claim("cuda:0", 301)
        assert mine.claim("cuda:0", 300)
        assert mine.free_room("cuda:0").free_bytes == 300  # its own claim does not block it
        mine.release()
    finally:
        other.kill()
        other.communicate()
    assert mine.claim("cuda:0", 900)
    mine.release()
    mine.release()
    assert [file.name for file in (tmp_path / "claims" / "GPU-0").iterdir()] == ["lock"]


def test_other_devices_and_unreadable_gpus_block_nothing(tmp_path: Path) -> None:
    gpu = FakeGpu(1000)
    claims = DeviceClaims(Gpus(FakeNvml(gpu)), tmp_path)
    assert claims.claim("", 2000)
    assert claims.free_room("cuda:1").free_bytes == UNKNOWN
    assert claims.claim("cuda:1", 2000)
    gpu.is_lost = True
    assert claims.free_room("cuda:0").free_bytes == UNKNOWN
    assert claims.claim("cuda:0", 2000)
    claims.release()
    unwritable = DeviceClaims(Gpus(FakeNvml(FakeGpu(1000))), Path("/proc/claims"))
    assert unwritable.claim("cuda:0", 10)
    unwritable.release()
