"""The GPU as a whole: its name, and its use by all processes during a measurement."""

import shutil
import subprocess
from statistics import mean
from typing import Any, Self

import torch

PERIOD_MS = 250
QUERY = "utilization.gpu,memory.used"


def get_device_name(device: str) -> str:
    return str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else "none"


def measure_used_mib(device: str) -> float:
    """Return the memory that all processes use; 0 without a GPU."""
    if not device.startswith("cuda"):
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return float((total - free) / 2**20)


class GpuWatch:
    """A context manager that measures how busy the GPU was, if nvidia-smi is installed."""

    def __init__(self, device: str) -> None:
        self._index = device.partition(":")[2] or "0"
        self._process: Any = None
        self.busy = 0.0  # share of time

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi"):
            flags = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}", f"-i={self._index}"]
            self._process = subprocess.Popen(["nvidia-smi", *flags], stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            said, _ = self._process.communicate(timeout=10)
            shares = [float(line.split(",")[0]) / 100 for line in said.splitlines() if line[:1].isdigit()]
            self.busy = mean(shares) if shares else 0.0
