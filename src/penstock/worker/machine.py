"""What a worker has of its machine, and how much of that it uses."""

import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import psutil
import structlog

from penstock.core.config import WorkerSettings
from penstock.pb.v1 import manager_pb2 as pb
from penstock.telemetry.control_groups import control_groups
from penstock.telemetry.machine import installed_version
from penstock.wire.sockets import host_identity

log = structlog.get_logger()


class Machine:
    def __init__(self, worker_id: str, node: str, settings: WorkerSettings, curve_key: str = "") -> None:
        """`curve_key`: the public one, by which gateways know the worker's process."""
        self._curve_key = curve_key
        self._node = node
        self._worker_id = worker_id
        self._settings = settings
        self._process = psutil.Process()
        self._looked = (time.monotonic(), self._cpu_s())
        self._gpus = _Gpus()
        self.door, self._is_door_tls = "", False

    def set_door(self, address: str, is_tls: bool) -> None:
        """Where clients reach the worker; empty: nowhere."""
        self.door, self._is_door_tls = address, is_tls

    def facts(self) -> pb.WorkerFacts:
        settings, shared = self._settings, self._shared()
        cpus = [each.cpus for each in shared if each.cpus]
        memory = [each.memory_bytes for each in shared if each.memory_bytes]
        return pb.WorkerFacts(
            node=self._node,
            host=host_identity(),
            zone=settings.zone_of(self._worker_id),
            labels=settings.labels,
            cpus=min(len(os.sched_getaffinity(0)), *cpus),
            memory_bytes=min([settings.memory_budget_bytes or memory[0], *memory]),
            gpu_memory_bytes=self._gpus.total_bytes(),
            version=installed_version("penstock-serve"),
            shared=shared,
            weight=settings.weight_of(self._worker_id),
            curve_key=self._curve_key,
            door=self.door,
            is_door_tls=self._is_door_tls,
        )

    def _shared(self) -> list[pb.SharedCapacity]:
        """The whole machine first. Two nodes on one machine, as in trials, are as two machines."""
        name = f"{self._node}/{host_identity()}"
        total = psutil.virtual_memory().total
        machine = pb.SharedCapacity(name=name, cpus=os.cpu_count() or 0, memory_bytes=total)
        gpus = [
            pb.SharedCapacity(name=f"{name}/{gpus}", gpu_memory_bytes=size)
            for gpus, size in self._gpus.shared().items()
        ]
        groups = [
            pb.SharedCapacity(name=f"{name}{group.path}", cpus=group.cpus, memory_bytes=group.memory_bytes)
            for group in control_groups()
        ]
        return [machine, *groups, *gpus]

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
    """Those of the machine that CUDA shows this process, where NVIDIA's library is there to ask."""

    def __init__(self) -> None:
        self._library: Any = None
        self._all: list[object] = []
        self._handles: list[object] = []
        try:
            library = import_module("pynvml")
            library.nvmlInit()
            found = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
            ids = [str(library.nvmlDeviceGetUUID(handle)) for handle in found]
            self._handles = [found[index] for index in _visible(ids, os.environ.get("CUDA_VISIBLE_DEVICES"))]
            self._all, self._library = found, library
        except Exception as error:  # noqa: BLE001 - no library, no driver, no permission: there is none to tell of
            log.debug("no_gpu", error=str(error))

    def total_bytes(self) -> int:
        return self._sum_bytes(self._handles)

    def shared(self) -> dict[str, int]:
        """The memory of all, and of those that other processes may be shown as well."""
        names = ",".join(str(self._all.index(handle)) for handle in self._handles)
        found = {"gpus": self._sum_bytes(self._all), f"gpus/{names}": self.total_bytes()}
        return {name: size for name, size in found.items() if size}

    def _sum_bytes(self, handles: list[object]) -> int:
        return sum(int(self._library.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)

    def load(self) -> tuple[float, int] | None:
        """The mean share of the time that they were busy, and the memory in use."""
        library = self._library
        if not self._handles:
            return None
        try:
            busy = [library.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
            used = sum(int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        except Exception as error:  # noqa: BLE001 - a device that fell off is no reason to end
            log.debug("gpu_not_read", error=str(error))
            return None
        return sum(busy) / len(busy), used


def _visible(ids: Sequence[str], shown: str | None) -> list[int]:
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
