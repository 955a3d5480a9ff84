"""Metrics on a full disk: they stay in memory, no process dies, and they are written when there is room."""

import os
import subprocess
import sys
from pathlib import Path

# A separate process in a separate mount namespace: a disk of 2 MiB, and SIGBUS for writes beyond it.
PROCESS = """
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry, Counter, Gauge
from penstock.telemetry.metrics import format_as_json, open_shared_registry, share_metrics

folder = Path(sys.argv[1])
filler = folder / "filler"

def fill():
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def shown():
    found = format_as_json(open_shared_registry(folder))
    return [sum(s["value"] for s in found[n]["samples"]) if n in found else None for n in ("seen", "inside")]

share_metrics(folder, "gateway-0")
registry = CollectorRegistry()
seen = Counter("seen", "Seen", ["kind"], registry=registry)
seen.labels("first").inc(2)
fill()
for number in range(2000):  # more than the first 64 KiB
    seen.labels(f"kind {number} " + "x" * 40).inc()
seen.labels("first").inc(3)
inside = Gauge("inside", "Inside", registry=registry, multiprocess_mode="livesum")  # its file cannot be made
inside.set(7)
full = shown()
filler.unlink()
import time
time.sleep(1.1)
for number in range(2000):
    seen.labels(f"kind {number} " + "x" * 40).inc()
inside.set(8)
print(full, shown())
"""


def test_a_full_disk_kills_no_process_and_is_logged_once(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path), sys.executable, "-c", PROCESS, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    *told, figures = ran.stdout.splitlines()
    seen_when_full = int(float(figures.split(",")[0].strip("[")))
    assert 5 < seen_when_full < 2005, "old values keep counting, and new ones while the first file has room"
    assert figures.endswith("[4005.0, 8.0]"), "all values are shown once there is room"
    assert figures.split("]")[0].endswith("None"), "a value without room in the file is not shown"
    assert sum("metrics_unwritable" in line for line in told) == 1
    assert sum("metrics_written_again" in line for line in told) == 1
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]
