"""NVIDIA GPUs as their driver (NVML) reports them: memory, utilization, and memory per process."""

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
    """A GPU that this process can use through CUDA."""

    index: int  # in CUDA's numbering
    handle: object
    uuid: str
    name: str
    memory_bytes: int

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A GPU's memory and utilization at one moment."""

    used_bytes: int
    free_bytes: int
    busy_share: float | None = None  # of the time, from 0 to 1; None: unknown
    processes: Mapping[int, int] = field(default_factory=dict)  # bytes by process id, as far as the driver reports them

    def sum_process_bytes(self, pids: Collection[int]) -> int | None:
        """Return the memory of these processes in bytes; None if the driver does not list them (in some containers)."""
        found = [size_bytes for pid, size_bytes in self.processes.items() if pid in pids]
        return sum(found) if found else None


class Gpus:
    """The machine's GPUs that this process can use through CUDA; empty if no driver is installed."""

    def __init__(self, library: Any = None, shown: str | None = None) -> None:
        """List the GPUs. `library`: initialized `pynvml`, or None without a driver; `shown`: CUDA_VISIBLE_DEVICES."""
        self._library = library
        self._all: list[NvidiaGpu] = []
        self.visible: list[NvidiaGpu] = []
        if library is None:
            return
        try:
            self._all = [_read_gpu(library, index) for index in range(library.nvmlDeviceGetCount())]
        except Exception as error:  # noqa: BLE001 - a driver that fails is treated as a machine without GPUs
            log.warning("gpus_not_listed", error=str(error))
        chosen = [self._all[index] for index in list_visible_gpus([gpu.uuid for gpu in self._all], shown)]
        self.visible = [
            NvidiaGpu(index, gpu.handle, gpu.uuid, gpu.name, gpu.memory_bytes) for index, gpu in enumerate(chosen)
        ]

    def find(self, device: str) -> NvidiaGpu | None:
        """Return the GPU with a device name; `cuda` means the first GPU."""
        kind, _, index = device.partition(":")
        number = int(index or 0)
        return self.visible[number] if kind == "cuda" and number < len(self.visible) else None

    def read(self, gpu: NvidiaGpu) -> GpuReading | None:
        """Read a GPU's memory and utilization; None if the GPU does not answer."""
        library = self._library
        try:
            memory = library.nvmlDeviceGetMemoryInfo(gpu.handle)
        except Exception as error:  # noqa: BLE001
            log.debug("gpu_not_read", device=gpu.device, error=str(error))
            return None
        # Everything that is not free counts as used, also the memory that the driver reserves.
        total, free = int(memory.total), int(memory.free)
        return GpuReading(total - free, free, self._read_busy_share(gpu), self._read_processes(gpu))

    def read_free_bytes(self, gpu: NvidiaGpu) -> int | None:
        """Return the GPU's free memory in bytes. This is faster than `read`."""
        try:
            return int(self._library.nvmlDeviceGetMemoryInfo(gpu.handle).free)
        except Exception as error:  # noqa: BLE001
            log.debug("gpu_not_read", device=gpu.device, error=str(error))
            return None

    def list_shared_memory(self) -> dict[str, int]:
        """Return the memory of all GPUs and of the visible GPUs, by names that are equal in all processes."""
        numbers = {gpu.uuid: number for number, gpu in enumerate(self._all)}
        names = ",".join(str(numbers[gpu.uuid]) for gpu in self.visible)
        found = {"gpus": sum(gpu.memory_bytes for gpu in self._all), f"gpus/{names}": self.memory_bytes}
        return {name: size for name, size in found.items() if size}

    @property
    def memory_bytes(self) -> int:
        return sum(gpu.memory_bytes for gpu in self.visible)

    def _read_busy_share(self, gpu: NvidiaGpu) -> float | None:
        try:
            return int(self._library.nvmlDeviceGetUtilizationRates(gpu.handle).gpu) / 100
        except Exception:  # noqa: BLE001 - a partition of a GPU (MIG) reports no utilization
            return None

    def _read_processes(self, gpu: NvidiaGpu) -> dict[int, int]:
        try:
            running = self._library.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        except Exception:  # noqa: BLE001 - not every driver supports this call
            return {}
        return {int(each.pid): int(each.usedGpuMemory) for each in running if each.usedGpuMemory is not None}


def open_gpus() -> Gpus:
    """Return the visible GPUs. The call takes microseconds if no driver is installed."""
    try:
        ctypes.CDLL(DRIVER)  # fails within microseconds; importing NVIDIA's package would take milliseconds
    except OSError:
        return Gpus()
    try:
        library = import_module("pynvml")
        library.nvmlInit()
    except Exception as error:  # noqa: BLE001 - without the package or the permission there are no usable GPUs
        log.warning("gpu_driver_not_usable", error=str(error))
        return Gpus()
    return Gpus(library, os.environ.get("CUDA_VISIBLE_DEVICES"))


def list_visible_gpus(ids: Sequence[str], shown: str | None) -> list[int]:
    """Return the indices of the GPUs that `shown` lists. As in CUDA, entries after an invalid entry are ignored."""
    if shown is None:
        return list(range(len(ids)))
    found: list[int] = []
    for name in (each.strip() for each in shown.split(",")):
        matches = [index for index, gpu in enumerate(ids) if name in (str(index), gpu) or gpu.startswith(name or "-")]
        if not matches:
            break
        found += matches[:1]
    return found


def _read_gpu(library: Any, index: int) -> NvidiaGpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    total = int(library.nvmlDeviceGetMemoryInfo(handle).total)
    return NvidiaGpu(
        index,
        handle,
        _decode_text(library.nvmlDeviceGetUUID(handle)),
        _decode_text(library.nvmlDeviceGetName(handle)),
        total,
    )


def _decode_text(text: str | bytes) -> str:
    """Return a text as str, because older bindings return bytes."""
    return text.decode() if isinstance(text, bytes) else text
