"""NVIDIA's GPUs, asked of their driver (NVML): memory, utilization, and what processes have of it."""

import ctypes
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import structlog

log = structlog.get_logger()
DRIVER = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One that CUDA shows this process."""

    index: int  # CUDA's
    handle: object
    uuid: str
    name: str
    memory_bytes: int

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What a GPU said at one moment."""

    used_bytes: int
    free_bytes: int
    busy: float | None = None  # share of the time
    processes: Mapping[int, int] = field(default_factory=dict)  # bytes by process id, as far as the driver tells

    def bytes_of(self, pids: Collection[int]) -> int | None:
        """None: it knows none of them, as in a container that has process ids of its own."""
        found = [size_bytes for pid, size_bytes in self.processes.items() if pid in pids]
        return sum(found) if found else None


class Gpus:
    """Those of the machine that CUDA shows this process; none without a driver."""

    def __init__(self, library: Any = None, shown: str | None = None) -> None:
        """`library` is `pynvml` or its like, begun; `shown` is CUDA_VISIBLE_DEVICES."""
        self._library = library
        self._all: list[NvidiaGpu] = []
        self.visible: list[NvidiaGpu] = []
        if library is None:
            return
        try:
            self._all = [_gpu(library, index) for index in range(library.nvmlDeviceGetCount())]
        except Exception as error:  # noqa: BLE001 - a driver that cannot tell has none to tell of
            log.warning("no_gpu", error=str(error))
        chosen = [self._all[index] for index in visible([gpu.uuid for gpu in self._all], shown)]
        self.visible = [
            NvidiaGpu(index, gpu.handle, gpu.uuid, gpu.name, gpu.memory_bytes) for index, gpu in enumerate(chosen)
        ]

    def find(self, device: str) -> NvidiaGpu | None:
        """`cuda` is the first."""
        kind, _, index = device.partition(":")
        number = int(index or 0)
        return self.visible[number] if kind == "cuda" and number < len(self.visible) else None

    def read(self, gpu: NvidiaGpu) -> GpuReading | None:
        """None: it does not answer, as one that fell off the bus."""
        library = self._library
        try:
            memory = library.nvmlDeviceGetMemoryInfo(gpu.handle)
        except Exception as error:  # noqa: BLE001
            log.debug("gpu_not_read", device=gpu.device, error=str(error))
            return None
        # What is used and not free is told: the driver's own part is nobody's to have.
        total, free = int(memory.total), int(memory.free)
        return GpuReading(total - free, free, self._busy(gpu), self._processes(gpu))

    def free_bytes(self, gpu: NvidiaGpu) -> int | None:
        """At this moment; quicker than all that `read` asks."""
        try:
            return int(self._library.nvmlDeviceGetMemoryInfo(gpu.handle).free)
        except Exception as error:  # noqa: BLE001
            log.debug("gpu_not_read", device=gpu.device, error=str(error))
            return None

    def shared(self) -> dict[str, int]:
        """The memory of all, and of those that other processes may be shown as well."""
        numbers = {gpu.uuid: number for number, gpu in enumerate(self._all)}
        names = ",".join(str(numbers[gpu.uuid]) for gpu in self.visible)
        found = {"gpus": sum(gpu.memory_bytes for gpu in self._all), f"gpus/{names}": self.memory_bytes}
        return {name: size for name, size in found.items() if size}

    @property
    def memory_bytes(self) -> int:
        return sum(gpu.memory_bytes for gpu in self.visible)

    def _busy(self, gpu: NvidiaGpu) -> float | None:
        try:
            return int(self._library.nvmlDeviceGetUtilizationRates(gpu.handle).gpu) / 100
        except Exception:  # noqa: BLE001 - a part of a GPU (MIG) has none
            return None

    def _processes(self, gpu: NvidiaGpu) -> dict[int, int]:
        try:
            running = self._library.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        except Exception:  # noqa: BLE001 - not every driver tells
            return {}
        return {int(each.pid): int(each.usedGpuMemory) for each in running if each.usedGpuMemory is not None}


def open_gpus() -> Gpus:
    """Costs nothing where there is no driver."""
    try:
        ctypes.CDLL(DRIVER)  # in vain: some microseconds, while NVIDIA's package takes some milliseconds to import
    except OSError:
        return Gpus()
    try:
        library = import_module("pynvml")
        library.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no package, no permission: there is none to tell of
        log.warning("no_gpu", error=str(error))
        return Gpus()
    return Gpus(library, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(ids: Sequence[str], shown: str | None) -> list[int]:
    """By CUDA's rule: numbers or beginnings of ids, up to the first that is none. So Ray gives each worker its own."""
    if shown is None:
        return list(range(len(ids)))
    found: list[int] = []
    for name in (each.strip() for each in shown.split(",")):
        matches = [index for index, gpu in enumerate(ids) if name in (str(index), gpu) or gpu.startswith(name or "-")]
        if not matches:
            break
        found += matches[:1]
    return found


def _gpu(library: Any, index: int) -> NvidiaGpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    total = int(library.nvmlDeviceGetMemoryInfo(handle).total)
    return NvidiaGpu(
        index, handle, _text(library.nvmlDeviceGetUUID(handle)), _text(library.nvmlDeviceGetName(handle)), total
    )


def _text(told: str | bytes) -> str:
    """Older bindings give bytes."""
    return told.decode() if isinstance(told, bytes) else told
