"""The needs of a block, the capacity of a worker, and whether the block fits. Pure: no I/O."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

GIB = 2**30


@dataclass(frozen=True, slots=True)
class BlockDemand:
    block_id: str
    replicas: int = 0  # 0: on every worker that may hold the block
    cpu: float = 0.0  # cores
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)  # that a worker must have; an empty value matches any
    anti_affinity: frozenset[str] = frozenset()  # names of blocks that must not be on the same worker
    # Names of this block in the anti-affinity of other blocks: its model, key=value of its labels and metadata.
    names: frozenset[str] = frozenset()
    weight: float = 1.0  # of each replica, relative to other blocks

    @property
    def is_unconstrained(self) -> bool:
        """Return whether the block has no constraints, so that every worker may and should hold the block."""
        needs = self.replicas or self.cpu or self.memory_bytes or self.gpu_memory_bytes
        return not (needs or self.labels or self.anti_affinity)


@dataclass(frozen=True, slots=True)
class SharedCapacity:
    """Capacity that is common to all workers that report the same name. A figure of 0 means no limit."""

    name: str
    cpus: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    worker_id: str
    host: str = ""  # empty: no other worker is on the same host
    zone: str = ""
    cpu: float = inf
    memory_bytes: float = inf
    gpu_memory_bytes: float = 0.0
    shared: tuple[SharedCapacity, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # in addition to the labels worker, host and zone
    weight: float = 1.0  # its capacity relative to other workers
    is_open: bool = True  # may get new blocks; False for a silent worker
    is_last_resort: bool = False  # gets only blocks that no other worker can hold
    is_leaving: bool = False  # must not hold any block
    machine: str = ""  # the machine, if several machines have the same host name; empty: the host


class FreeCapacity:
    """The free part of a worker's own or shared capacity."""

    def __init__(self, cpu: float, memory: float, gpu_memory: float, place: str = "") -> None:
        self.cpu, self.memory, self.gpu_memory = cpu, memory, gpu_memory
        self.whole_cpu, self.whole_memory, self.whole_gpu_memory = cpu, memory, gpu_memory
        self._where = place

    def count(self, block: BlockDemand, sign: int) -> None:
        self.cpu -= sign * block.cpu
        self.memory -= sign * block.memory_bytes
        self.gpu_memory -= sign * block.gpu_memory_bytes

    def explain_refusal(self, block: BlockDemand) -> str:
        if block.cpu > self.cpu:
            return f"the block needs {block.cpu:g} cores, and {self.cpu:g} of {self.whole_cpu:g} are free{self._where}"
        if block.memory_bytes > self.memory:
            return _describe_shortage("memory", block.memory_bytes, self.memory, self.whole_memory) + self._where
        if block.gpu_memory_bytes <= self.gpu_memory:
            return ""
        if not self.whole_gpu_memory:
            return "the block needs a GPU, and the worker has none"
        return (
            _describe_shortage("GPU memory", block.gpu_memory_bytes, self.gpu_memory, self.whole_gpu_memory)
            + self._where
        )


class Site:
    """A worker during a placement, with its free capacity and the blocks that are placed there."""

    def __init__(self, capacity: WorkerCapacity, shared: dict[str, FreeCapacity]) -> None:
        """Create a site without blocks. `shared` is the free shared capacity by name; this worker's names are added."""
        self.worker_id = capacity.worker_id
        self.host = capacity.host or capacity.worker_id
        self.machine = capacity.machine or self.host
        self.zone = capacity.zone
        self.is_open = capacity.is_open and not capacity.is_leaving
        self.is_last_resort = capacity.is_last_resort
        self.is_leaving = capacity.is_leaving
        self.weight = capacity.weight
        self.blocks: dict[str, BlockDemand] = {}
        self.load = 0.0  # the weight of all its blocks
        self.level = 0.0  # `load` divided by the worker's own weight
        self.key = self.worker_id.encode()
        self._labels = {"worker": self.worker_id, "host": self.host, "zone": self.zone, **capacity.labels}
        self._free = [FreeCapacity(capacity.cpu, capacity.memory_bytes, capacity.gpu_memory_bytes)]
        for each in capacity.shared:
            free = FreeCapacity(
                each.cpus or inf, each.memory_bytes or inf, each.gpu_memory_bytes or inf, " on its machine"
            )
            self._free.append(shared.setdefault(each.name, free))
        self._names: Counter[str] = Counter()  # of its blocks
        self._excluded: Counter[str] = Counter()  # names in the anti-affinity of its blocks

    def add_block(self, block: BlockDemand) -> None:
        self.blocks[block.block_id] = block
        self._adjust(block, 1)

    def remove_block(self, block: BlockDemand) -> None:
        del self.blocks[block.block_id]
        self._adjust(block, -1)

    def add_load(self, weight: float) -> None:
        self.load += weight
        self.level = self.load / self.weight

    def compute_level_with(self, block: BlockDemand) -> float:
        return (self.load + block.weight) / self.weight

    def conflicts_with(self, block: BlockDemand) -> bool:
        """Return whether anti-affinity keeps the block away from a block on this worker."""
        excluded = self._excluded
        return not self._names.keys().isdisjoint(block.anti_affinity) or (
            bool(excluded) and (block.block_id in excluded or not excluded.keys().isdisjoint(block.names))
        )

    def fits_without(self, block: BlockDemand, other: BlockDemand) -> bool:
        self._adjust(other, -1)
        refusal = self.explain_refusal(block)
        self._adjust(other, 1)
        return not refusal

    def explain_refusal(self, block: BlockDemand, is_held: bool = False) -> str:
        """Return why the worker may not hold the block, as the end of a sentence; empty if the worker may.

        `is_held`: the worker already holds the block, and may keep it even if the worker gets no new blocks.
        """
        if not self.is_open:
            if self.is_leaving:
                return "the worker is draining"
            if not is_held:
                return "the worker has not reported lately, so it gets no new blocks"
        for key, value in block.labels.items():
            found = self._labels.get(key)
            if not found or (value and found != value):
                actual = _format_label(key, found) if found else f"no {key}"
                return f"the block needs {_format_label(key, value)}, and the worker has {actual}"
        if block.cpu or block.memory_bytes or block.gpu_memory_bytes:
            for free in self._free:
                if refusal := free.explain_refusal(block):
                    return refusal
        if (block.anti_affinity or self._excluded) and self.conflicts_with(block):
            return f"the block must not be on a worker with {self._find_conflict(block)}, which is there"
        return ""

    def list_merits(self, block: BlockDemand) -> list[str]:
        """Return phrases that name the labels and resources that the block needs and the worker has."""
        has = [_format_label(key, self._labels[key]) for key in block.labels if self._labels.get(key)]
        found = [f"it has {', '.join(has)}"] if has else []
        cpu, cpus = min((free.cpu, free.whole_cpu) for free in self._free)
        if block.cpu and cpus < inf:
            found.append(f"{cpu:g} of {cpus:g} cores are left")
        memory = min((free.memory, free.whole_memory) for free in self._free)
        gpu_memory = min((free.gpu_memory, free.whole_gpu_memory) for free in self._free)
        for what, needed, (left, whole) in (
            ("memory", block.memory_bytes, memory),
            ("GPU memory", block.gpu_memory_bytes, gpu_memory),
        ):
            if needed and whole < inf:
                found.append(f"{left / GIB:.3g} of {whole / GIB:.3g} GiB of {what} are left")
        return found

    def _find_conflict(self, block: BlockDemand) -> str:
        return next(
            other.block_id
            for other in self.blocks.values()
            if block.anti_affinity & _list_names(other) or other.anti_affinity & _list_names(block)
        )

    def _adjust(self, block: BlockDemand, sign: int) -> None:
        self.add_load(sign * block.weight)
        for free in self._free:
            free.count(block, sign)
        for counted, names in ((self._names, _list_names(block)), (self._excluded, block.anti_affinity)):
            for name in names:
                counted[name] += sign
                if not counted[name]:
                    del counted[name]


def _list_names(block: BlockDemand) -> frozenset[str]:
    return block.names | {block.block_id}


def _format_label(key: str, value: str) -> str:
    return f"{key}={value}" if value else f"the label {key}"


def _describe_shortage(resource: str, needed: float, free: float, whole: float) -> str:
    return f"the block needs {needed / GIB:.3g} GiB of {resource}, and {free / GIB:.3g} of {whole / GIB:.3g} are free"
