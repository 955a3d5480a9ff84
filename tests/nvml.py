"""Simulated GPUs: a driver library for NVIDIA's binding, and a substitute for the binding itself."""

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

GIB = 2**30
HAS_COMPILER = shutil.which("cc") is not None
# Just enough of NVIDIA's library for the real binding: two GPUs, the second of which reports neither load nor
# processes.
STUB = """
#include <string.h>
typedef unsigned int u; typedef unsigned long long ull;
static int gpus[2];
u nvmlInitWithFlags(u flags) { return 0; }
u nvmlDeviceGetCount_v2(u *count) { *count = 2; return 0; }
u nvmlDeviceGetHandleByIndex_v2(u index, void **handle) { *handle = &gpus[index]; return index < 2 ? 0 : 2; }
u nvmlDeviceGetUUID(void *gpu, char *text, u size) { strcpy(text, gpu == gpus ? "GPU-a" : "GPU-b"); return 0; }
u nvmlDeviceGetName(void *gpu, char *text, u size) { strcpy(text, "Stub"); return 0; }
u nvmlDeviceGetMemoryInfo(void *gpu, ull *memory) { memory[0] = 1000; memory[1] = 300; memory[2] = 600; return 0; }
u nvmlDeviceGetUtilizationRates(void *gpu, u *rates) { rates[0] = 42; rates[1] = 7; return gpu == gpus ? 0 : 3; }
typedef struct { u pid; ull used; u instance, compute; } process;
u nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, u *count, process *found) {
    if (gpu != gpus) return 3;
    if (*count < 2) { *count = 2; return 7; }
    *count = 2; found[0].pid = 11; found[0].used = 250; found[1].pid = 12; found[1].used = -1ull;
    return 0;
}
"""


def make_stub_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that finds the stub as its driver; without a compiler it is empty."""
    if not HAS_COMPILER:
        return {}
    (folder / "stub.c").write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", "libnvidia-ml.so.1", "stub.c"], cwd=folder, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@dataclass(slots=True, eq=False)
class FakeGpu:
    total: int = 8 * GIB
    used: int = 0
    busy: int | None = 0  # percent; None: not reported
    processes: dict[int, int | None] = field(default_factory=dict)
    is_lost: bool = False


class FakeNvml:
    """The part of `pynvml` that Penstock uses."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = gpus

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return f"GPU-{self.gpus.index(gpu)}"

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        return b"NVIDIA Imagined"

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        if gpu.is_lost:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(total=gpu.total, free=gpu.total - gpu.used, used=gpu.used)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        if gpu.busy is None:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=gpu.busy, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.processes.items()]
