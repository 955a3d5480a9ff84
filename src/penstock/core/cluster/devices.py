"""The state of GPUs, reported by one worker and merged over all workers of a server."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    device: str  # as the worker's models name it: cuda:0
    uuid: str  # the same for all workers that share the device
    name: str
    memory_bytes: int
    used_bytes: int  # by all processes
    busy: float | None = None  # utilization from 0 to 1; None: unknown
    worker_bytes: int | None = None  # used by the worker and its child processes; None: unknown
    blocks: dict[str, int] = field(default_factory=dict)  # memory in bytes that loading each block took


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    busy: float | None
    workers: list[str]  # that may use the device
    blocks: dict[str, int]  # bytes that loading each block took, over all these workers


def merge_devices(reports: Iterable[tuple[str, WorkerDevice]]) -> list[DeviceStatus]:
    """Merge the reports of devices that several workers share. `reports` has pairs of a worker's id and its report."""
    ordered = sorted(reports, key=lambda each: (each[1].uuid, each[0]))
    return [_merge_reports([*group]) for _, group in groupby(ordered, key=lambda each: each[1].uuid)]


def _merge_reports(reports: list[tuple[str, WorkerDevice]]) -> DeviceStatus:
    """Merge the workers' reports of one device; use the highest values, because they were read at different times."""
    devices = [device for _, device in reports]
    blocks: dict[str, int] = {}
    for device in devices:
        for block_id, size_bytes in device.blocks.items():
            blocks[block_id] = blocks.get(block_id, 0) + size_bytes
    first = devices[0]
    return DeviceStatus(
        first.uuid,
        first.name,
        first.memory_bytes,
        max(device.used_bytes for device in devices),
        max((device.busy for device in devices if device.busy is not None), default=None),
        [worker for worker, _ in reports],
        blocks,
    )
