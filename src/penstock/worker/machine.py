"""What a worker has of its machine, and how much of that it uses."""

import os
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import psutil
import structlog

from penstock.pb.v1 import manager_pb2 as pb
from penstock.wire.sockets import host_identity

log = structlog.get_logger()
CGROUP = Path("/sys/fs/cgroup/memory.max")


class Machine:
    def __init__(self, node: str, zone: str, labels: dict[str, str], budget_bytes: int = 0) -> None:
        """`budget_bytes` is what its models may take of the memory; 0: all of it."""
        self._node, self._zone, self._labels = node, zone, labels
        self._budget_bytes = budget_bytes
        self._process = psutil.Process()
        self._looked = (time.monotonic(), self._cpu_s())
        self._gpus = _Gpus()

    def facts(self) -> pb.WorkerFacts:
        return pb.WorkerFacts(
            node=self._node,
            host=host_identity(),
            zone=self._zone,
            labels=self._labels,
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=self._budget_bytes or int(min(psutil.virtual_memory().total, _cgroup_bytes())),
            gpu_memory_bytes=self._gpus.total_bytes(),
            version=_version(),
        )

    def load(self) -> pb.WorkerLoad:
        """In use since this was last asked."""
        before, used_s = self._looked
        self._looked = (time.monotonic(), self._cpu_s())
        passed_s = max(self._looked[0] - before, 0.001)
        load = pb.WorkerLoad(
            cpu=max(0.0, self._looked[1] - used_s) / passed_s, memory_bytes=self._process.memory_info().rss
        )
        if (gpu := self._gpus.load()) is not None:
            load.gpu, load.gpu_memory_bytes = gpu
        return load

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system + times.children_user + times.children_system


class _Gpus:
    """Those of the machine, where NVIDIA's library is there to ask."""

    def __init__(self) -> None:
        self._library: ModuleType | None = None
        self._handles: list[object] = []
        try:
            library = import_module("pynvml")
            library.nvmlInit()
            self._handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
            self._library = library
        except Exception as error:  # noqa: BLE001 - no library, no driver, no permission: there is none to tell of
            log.debug("no_gpu", error=str(error))

    def total_bytes(self) -> int:
        library = self._library
        if library is None:
            return 0
        return sum(int(library.nvmlDeviceGetMemoryInfo(handle).total) for handle in self._handles)

    def load(self) -> tuple[float, int] | None:
        """The mean share of the time that they were busy, and the memory in use."""
        library = self._library
        if library is None or not self._handles:
            return None
        try:
            busy = [library.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
            used = sum(int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        except Exception as error:  # noqa: BLE001 - a device that fell off is no reason to end
            log.debug("gpu_not_read", error=str(error))
            return None
        return sum(busy) / len(busy), used


def _cgroup_bytes() -> float:
    with suppress(OSError, ValueError):
        return int(CGROUP.read_text())
    return float("inf")


def _version() -> str:
    try:
        return version("penstock-serve")
    except PackageNotFoundError:
        return ""
