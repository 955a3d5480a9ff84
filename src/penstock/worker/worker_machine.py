"""Reports the resources of a worker's machine, and how much of them the worker uses."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from penstock.core.cluster.devices import WorkerDevice
from penstock.core.config import WorkerSettings
from penstock.engines.hosting.process_usage import measure_descendants
from penstock.pb.v1 import manager_pb2 as pb
from penstock.telemetry.control_groups import list_control_groups
from penstock.telemetry.gpus import GpuReading, Gpus
from penstock.telemetry.machine import find_installed_version
from penstock.telemetry.metrics import WorkerMetrics
from penstock.wire.encodings import encode_devices
from penstock.wire.sockets import read_host_identity

PROCESSORS = Path("/sys/devices/system/cpu")


def find_siblings(folder: Path = PROCESSORS) -> dict[int, frozenset[int]]:
    """Return each processor that this process may use, with all processors that share the same core."""
    return {number: _read_siblings(folder / f"cpu{number}", number) for number in sorted(os.sched_getaffinity(0))}


def _read_siblings(folder: Path, number: int) -> frozenset[int]:
    try:
        siblings = (folder / "topology" / "thread_siblings_list").read_text()
        ranges = [part.partition("-") for part in siblings.strip().split(",")]
        return frozenset(one for low, _, high in ranges for one in range(int(low), int(high or low) + 1))
    except (OSError, ValueError):  # some systems do not have this file
        return frozenset((number,))


class BlockGpuMemory(NamedTuple):
    """The GPU that a block was loaded on, and the memory that it took there."""

    block_id: str
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The CPU time and memory that the worker and its child processes use at one moment."""

    measured_at: float
    cpu_s: float
    memory_bytes: int
    pids: frozenset[int]
    gpus: Mapping[str, GpuReading] = field(default_factory=dict)  # by uuid


class Machine:
    """Measures the resources of a worker's machine, and how much of them the worker uses."""

    def __init__(
        self, worker_id: str, node: str, settings: WorkerSettings, curve_key: str = "", gpus: Gpus | None = None
    ) -> None:
        """`curve_key`: the worker's public CURVE key, by which gateways identify the worker."""
        self._curve_key = curve_key
        self._node = node
        self._worker_id = worker_id
        self._settings = settings
        self._process = psutil.Process()
        self._gpus = gpus or Gpus()
        self._last_measurement = self._reported_measurement = self._measure()
        self.direct, self._is_direct_tls = "", False

    def set_direct(self, address: str, is_tls: bool) -> None:
        """Set the address for clients that connect directly; an empty text means that they cannot."""
        self.direct, self._is_direct_tls = address, is_tls

    def facts(self) -> pb.WorkerFacts:
        settings, shared = self._settings, self._shared_capacities()
        cpus = [each.cpus for each in shared if each.cpus]
        memory = [each.memory_bytes for each in shared if each.memory_bytes]
        return pb.WorkerFacts(
            node=self._node,
            host=read_host_identity(),
            zone=settings.zone,
            labels=settings.labels,
            cpus=min(len(os.sched_getaffinity(0)), *cpus),
            memory_bytes=min([settings.memory_budget_bytes or memory[0], *memory]),
            gpu_memory_bytes=self._gpus.memory_bytes,
            version=find_installed_version("penstock-serve"),
            shared=shared,
            weight=settings.find_weight(self._worker_id),
            curve_key=self._curve_key,
            door=self.direct,
            is_door_tls=self._is_direct_tls,
        )

    def _shared_capacities(self) -> list[pb.SharedCapacity]:
        """Return the CPU and memory that this worker shares with others: the machine's, control groups' and GPUs'.

        Two nodes on one machine count as two machines.
        """
        name = f"{self._node}/{read_host_identity()}"
        total = psutil.virtual_memory().total
        machine = pb.SharedCapacity(name=name, cpus=os.cpu_count() or 0, memory_bytes=total)
        gpus = [
            pb.SharedCapacity(name=f"{name}/{gpus}", gpu_memory_bytes=size)
            for gpus, size in self._gpus.list_shared_memory().items()
        ]
        groups = [
            pb.SharedCapacity(name=f"{name}{group.path}", cpus=group.cpus, memory_bytes=group.memory_bytes)
            for group in list_control_groups()
        ]
        return [machine, *groups, *gpus]

    def measure(self) -> None:
        """Measure the worker's CPU, memory and GPU use, which the other methods then return.

        This method blocks: do not call it on the event loop.
        """
        self._last_measurement = self._measure()

    @property
    def memory_bytes(self) -> int:
        return self._last_measurement.memory_bytes

    def devices(self, blocks: Iterable[BlockGpuMemory]) -> list[WorkerDevice]:
        placed: dict[str, dict[str, int]] = {}
        for block in blocks:
            if (gpu := self._gpus.find(block.device)) is not None:
                placed.setdefault(gpu.uuid, {})[block.block_id] = block.memory_bytes
        look = self._last_measurement
        return [
            WorkerDevice(
                gpu.device,
                gpu.uuid,
                gpu.name,
                gpu.memory_bytes,
                reading.used_bytes,
                reading.busy_share,
                reading.sum_process_bytes(look.pids),
                placed.get(gpu.uuid, {}),
            )
            for gpu in self._gpus.visible
            if (reading := look.gpus.get(gpu.uuid)) is not None
        ]

    def load(self, blocks: Iterable[BlockGpuMemory] = ()) -> pb.WorkerLoad:
        """Return the memory and GPU use at the last measurement, and the CPU use since the last call of `load`."""
        last, reported = self._last_measurement, self._reported_measurement
        self._reported_measurement = last
        cpu = max(0.0, last.cpu_s - reported.cpu_s) / max(last.measured_at - reported.measured_at, 0.001)
        load = pb.WorkerLoad(cpu=cpu, memory_bytes=last.memory_bytes)
        devices = self.devices(blocks)
        load.devices.extend(encode_devices(devices))
        if devices:
            load.gpu_memory_bytes = sum(device.used_bytes for device in devices)
        if busy := [device.busy for device in devices if device.busy is not None]:
            load.gpu = sum(busy) / len(busy)
        return load

    def _measure(self) -> _Measurement:
        children = measure_descendants(self._process.pid)
        times = self._process.cpu_times()
        gone_s = times.children_user + times.children_system
        readings = {gpu.uuid: self._gpus.read(gpu) for gpu in self._gpus.visible}
        return _Measurement(
            time.monotonic(),
            times.user + times.system + gone_s + children.cpu_s,
            self._process.memory_info().rss + children.memory_bytes,
            frozenset([self._process.pid, *children.pids]),
            {uuid: reading for uuid, reading in readings.items() if reading is not None},
        )


class DeviceGauges:
    """Sets the shared metrics of the GPUs that the worker uses."""

    def __init__(self, metrics: WorkerMetrics, worker_id: str) -> None:
        self._metrics = metrics
        self._worker_id = worker_id
        self._labels_set: set[tuple[str, str, str]] = set()  # labels of blocks: model, version, uuid

    def set_gauges(self, devices: Iterable[WorkerDevice], names: Mapping[str, tuple[str, str]]) -> None:
        metrics, held = self._metrics, set()
        for device in devices:
            its = (device.uuid, device.name)
            metrics.device_memory.labels(*its, "all").set(device.memory_bytes)
            metrics.device_memory.labels(*its, "used").set(device.used_bytes)
            if device.busy is not None:
                metrics.device_busy.labels(*its).set(device.busy)
            if device.worker_bytes is not None:
                metrics.worker_device_memory.labels(self._worker_id, device.uuid).set(device.worker_bytes)
            for block_id, size_bytes in device.blocks.items():
                labels = (*names.get(block_id, ("", "")), device.uuid)
                metrics.block_device_memory.labels(*labels).set(size_bytes)
                held.add(labels)
        for gone in self._labels_set - held:
            metrics.block_device_memory.labels(*gone).set(0)
        self._labels_set = held
