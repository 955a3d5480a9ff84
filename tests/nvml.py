"""GPUs that are not there: what Penstock asks of NVIDIA's `pynvml`, with the answers that a test says."""

from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 2**30


@dataclass(slots=True, eq=False)
class FakeGpu:
    total: int = 8 * GIB
    used: int = 0
    busy: int | None = 0  # percent; none: it does not tell
    processes: dict[int, int | None] = field(default_factory=dict)
    is_lost: bool = False


class FakeNvml:
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
