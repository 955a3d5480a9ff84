"""What a worker has of its machine, and how much of that it uses."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from penstock.core.cluster.devices import WorkerDevice
from penstock.core.config import WorkerSettings
from penstock.engines.hosting.usage import children_use
from penstock.pb.v1 import manager_pb2 as pb
from penstock.telemetry.control_groups import control_groups
from penstock.telemetry.devices import GpuReading, Gpus
from penstock.telemetry.machine import installed_version
from penstock.wire.forms import encode_devices
from penstock.wire.sockets import host_identity

PROCESSORS = Path("/sys/devices/system/cpu")


def find_siblings(folder: Path = PROCESSORS) -> dict[int, frozenset[int]]:
    """The processors that this process may use, and for each those that share its core."""
    return {number: _siblings(folder / f"cpu{number}", number) for number in sorted(os.sched_getaffinity(0))}


def _siblings(folder: Path, number: int) -> frozenset[int]:
    try:
        told = (folder / "topology" / "thread_siblings_list").read_text()
        ranges = [part.partition("-") for part in told.strip().split(",")]
        return frozenset(one for low, _, high in ranges for one in range(int(low), int(high or low) + 1))
    except (OSError, ValueError):  # not every system tells
        return frozenset((number,))


class OnDevice(NamedTuple):
    """What a block took of a GPU's memory when it was loaded."""

    block_id: str
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Look:
    """At the worker with the processes that it started."""

    at: float
    cpu_s: float
    memory_bytes: int
    pids: frozenset[int]
    gpus: Mapping[str, GpuReading] = field(default_factory=dict)  # by uuid


class Machine:
    def __init__(
        self, worker_id: str, node: str, settings: WorkerSettings, curve_key: str = "", gpus: Gpus | None = None
    ) -> None:
        """`curve_key`: the public one, by which gateways know the worker's process."""
        self._curve_key = curve_key
        self._node = node
        self._worker_id = worker_id
        self._settings = settings
        self._process = psutil.Process()
        self._gpus = gpus or Gpus()
        self._last = self._told = self._look()
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
            gpu_memory_bytes=self._gpus.memory_bytes,
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

    def look(self) -> None:
        """Reads files and asks the driver: not for the event loop. What the others tell is of the last look."""
        self._last = self._look()

    @property
    def memory_bytes(self) -> int:
        """The worker's, and what the processes that it started have for themselves."""
        return self._last.memory_bytes

    def devices(self, blocks: Iterable[OnDevice]) -> list[WorkerDevice]:
        placed: dict[str, dict[str, int]] = {}
        for block in blocks:
            if (gpu := self._gpus.find(block.device)) is not None:
                placed.setdefault(gpu.uuid, {})[block.block_id] = block.memory_bytes
        look = self._last
        return [
            WorkerDevice(
                gpu.device,
                gpu.uuid,
                gpu.name,
                gpu.memory_bytes,
                reading.used_bytes,
                reading.busy,
                reading.bytes_of(look.pids),
                placed.get(gpu.uuid, {}),
            )
            for gpu in self._gpus.visible
            if (reading := look.gpus.get(gpu.uuid)) is not None
        ]

    def load(self, blocks: Iterable[OnDevice] = ()) -> pb.WorkerLoad:
        """In use, and the cores since this was last asked."""
        last, told = self._last, self._told
        self._told = last
        cpu = max(0.0, last.cpu_s - told.cpu_s) / max(last.at - told.at, 0.001)
        load = pb.WorkerLoad(cpu=cpu, memory_bytes=last.memory_bytes)
        devices = self.devices(blocks)
        load.devices.extend(encode_devices(devices))
        if devices:
            load.gpu_memory_bytes = sum(device.used_bytes for device in devices)
        if busy := [device.busy for device in devices if device.busy is not None]:
            load.gpu = sum(busy) / len(busy)
        return load

    def _look(self) -> _Look:
        children = children_use(self._process.pid)
        times = self._process.cpu_times()
        gone_s = times.children_user + times.children_system
        readings = {gpu.uuid: self._gpus.read(gpu) for gpu in self._gpus.visible}
        return _Look(
            time.monotonic(),
            times.user + times.system + gone_s + children.cpu_s,
            self._process.memory_info().rss + children.memory_bytes,
            frozenset([self._process.pid, *children.pids]),
            {uuid: reading for uuid, reading in readings.items() if reading is not None},
        )
