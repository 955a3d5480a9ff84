"""GPUs: as one worker sees them, and as all workers of a server have them together."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    device: str  # as the worker's models name it: cuda:0
    uuid: str  # the same for all that share it
    name: str
    memory_bytes: int
    used_bytes: int  # by all processes
    busy: float | None = None  # share of the time; None: nobody can tell
    worker_bytes: int | None = None  # of what is used, by the worker and its processes; None: nobody can tell
    blocks: dict[str, int] = field(default_factory=dict)  # what each took when it was loaded


@dataclass(frozen=True, slots=True)
class DeviceStanding:
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    busy: float | None
    workers: list[str]  # that may use it
    blocks: dict[str, int]  # what each took, on all of these workers


def gather(seen: Iterable[tuple[str, WorkerDevice]]) -> list[DeviceStanding]:
    """Each device once; `seen` has the worker beside what it sees."""
    ordered = sorted(seen, key=lambda each: (each[1].uuid, each[0]))
    return [_together([*group]) for _, group in groupby(ordered, key=lambda each: each[1].uuid)]


def _together(seen: list[tuple[str, WorkerDevice]]) -> DeviceStanding:
    """What is used and busy is the whole device's: workers look at their own moments, and the highest is told."""
    devices = [device for _, device in seen]
    blocks: dict[str, int] = {}
    for device in devices:
        for block_id, size_bytes in device.blocks.items():
            blocks[block_id] = blocks.get(block_id, 0) + size_bytes
    first = devices[0]
    return DeviceStanding(
        first.uuid,
        first.name,
        first.memory_bytes,
        max(device.used_bytes for device in devices),
        max((device.busy for device in devices if device.busy is not None), default=None),
        [worker for worker, _ in seen],
        blocks,
    )
