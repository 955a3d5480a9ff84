"""What a block needs and what a worker has, and whether the one fits on the other. Decides; never acts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

GIB = 2**30


@dataclass(frozen=True, slots=True)
class BlockDemand:
    block_id: str
    replicas: int = 0  # 0: every worker that may
    cpu: float = 0.0  # cores
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)  # that a worker must have; of an empty value the key alone
    anti_affinity: frozenset[str] = frozenset()  # names of blocks that no worker holds beside it
    # What others may call it there: its model, key=value of its labels and metadata.
    names: frozenset[str] = frozenset()
    weight: float = 1.0  # of each replica, beside other blocks'

    @property
    def is_plain(self) -> bool:
        """It asks for nothing: every worker may hold it, and should."""
        asks = self.replicas or self.cpu or self.memory_bytes or self.gpu_memory_bytes
        return not (asks or self.labels or self.anti_affinity)


@dataclass(frozen=True, slots=True)
class SharedCapacity:
    """What all workers have together that name it alike; 0: it does not bound them."""

    name: str
    cpus: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    worker_id: str
    host: str = ""  # empty: one of its own
    zone: str = ""
    cpu: float = inf
    memory_bytes: float = inf
    gpu_memory_bytes: float = 0.0
    shared: tuple[SharedCapacity, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # worker, host and zone are labels, too
    weight: float = 1.0  # what it can do beside others
    is_open: bool = True  # it takes what it did not hold; one that is silent does not
    is_last: bool = False  # it is asked only where nobody else may
    is_leaving: bool = False  # it is to hold nothing
    machine: str = ""  # that it runs on, where several are of one host's name; empty: its host


class SiteRoom:
    """How much is left, of what a worker has itself or of what it shares."""

    def __init__(self, cpu: float, memory: float, gpu_memory: float, where: str = "") -> None:
        self.cpu, self.memory, self.gpu_memory = cpu, memory, gpu_memory
        self.whole_cpu, self.whole_memory, self.whole_gpu_memory = cpu, memory, gpu_memory
        self._where = where

    def count(self, block: BlockDemand, sign: int) -> None:
        self.cpu -= sign * block.cpu
        self.memory -= sign * block.memory_bytes
        self.gpu_memory -= sign * block.gpu_memory_bytes

    def refusal(self, block: BlockDemand) -> str:
        if block.cpu > self.cpu:
            return f"the block needs {block.cpu:g} cores, and {self.cpu:g} of {self.whole_cpu:g} are free{self._where}"
        if block.memory_bytes > self.memory:
            return _too_large("memory", block.memory_bytes, self.memory, self.whole_memory) + self._where
        if block.gpu_memory_bytes <= self.gpu_memory:
            return ""
        if not self.whole_gpu_memory:
            return "the block needs a GPU, and it has none"
        return _too_large("GPU memory", block.gpu_memory_bytes, self.gpu_memory, self.whole_gpu_memory) + self._where


class Site:
    """A worker while blocks are placed."""

    def __init__(self, capacity: WorkerCapacity, shared: dict[str, SiteRoom]) -> None:
        """`shared`: what is left of what workers share, by its name; filled here."""
        self.worker_id = capacity.worker_id
        self.host = capacity.host or capacity.worker_id
        self.machine = capacity.machine or self.host
        self.zone = capacity.zone
        self.is_open = capacity.is_open and not capacity.is_leaving
        self.is_last = capacity.is_last
        self.is_leaving = capacity.is_leaving
        self.weight = capacity.weight
        self.blocks: dict[str, BlockDemand] = {}
        self.level = 0.0  # the weight of what it holds by its own
        self.load = 0.0
        self.key = self.worker_id.encode()
        self._labels = {"worker": self.worker_id, "host": self.host, "zone": self.zone, **capacity.labels}
        self._rooms = [SiteRoom(capacity.cpu, capacity.memory_bytes, capacity.gpu_memory_bytes)]
        for each in capacity.shared:
            room = SiteRoom(each.cpus or inf, each.memory_bytes or inf, each.gpu_memory_bytes or inf, " on its machine")
            self._rooms.append(shared.setdefault(each.name, room))
        self._names: Counter[str] = Counter()  # of what it holds
        self._shunned: Counter[str] = Counter()  # by what it holds

    def put(self, block: BlockDemand) -> None:
        self.blocks[block.block_id] = block
        self._count(block, 1)

    def take(self, block: BlockDemand) -> None:
        del self.blocks[block.block_id]
        self._count(block, -1)

    def carry(self, weight: float) -> None:
        """Of blocks that ask for nothing, and that nobody moves."""
        self.load += weight
        self.level = self.load / self.weight

    def level_with(self, block: BlockDemand) -> float:
        return (self.load + block.weight) / self.weight

    def is_shunned(self, block: BlockDemand) -> bool:
        """Something here is not to be beside the block."""
        shunned = self._shunned
        return not self._names.keys().isdisjoint(block.anti_affinity) or (
            bool(shunned) and (block.block_id in shunned or not shunned.keys().isdisjoint(block.names))
        )

    def fits_without(self, block: BlockDemand, other: BlockDemand) -> bool:
        self._count(other, -1)
        refusal = self.refusal(block)
        self._count(other, 1)
        return not refusal

    def refusal(self, block: BlockDemand, is_held: bool = False) -> str:
        """Why the block may not be here, as the end of a sentence; empty: it may. What is held may stay on one that
        takes nothing new."""
        if not self.is_open:
            if self.is_leaving:
                return "it is being drained"
            if not is_held:
                return "it has not been heard of lately, so it is given nothing new"
        for key, value in block.labels.items():
            found = self._labels.get(key)
            if not found or (value and found != value):
                return (
                    f"the block wants {_label(key, value)}, and it has {_label(key, found) if found else f'no {key}'}"
                )
        if block.cpu or block.memory_bytes or block.gpu_memory_bytes:
            for room in self._rooms:
                if refusal := room.refusal(block):
                    return refusal
        if (block.anti_affinity or self._shunned) and self.is_shunned(block):
            return f"the block is not to be beside {self._enemy(block)}, which is there"
        return ""

    def merits(self, block: BlockDemand) -> list[str]:
        """What it has of what the block asks for, with the block on it; each the beginning of a sentence."""
        has = [_label(key, self._labels[key]) for key in block.labels if self._labels.get(key)]
        found = [f"it has {', '.join(has)}"] if has else []
        cpu, cpus = min((room.cpu, room.whole_cpu) for room in self._rooms)
        if block.cpu and cpus < inf:
            found.append(f"{cpu:g} of {cpus:g} cores are left")
        memory = min((room.memory, room.whole_memory) for room in self._rooms)
        gpu_memory = min((room.gpu_memory, room.whole_gpu_memory) for room in self._rooms)
        for what, needed, (left, whole) in (
            ("memory", block.memory_bytes, memory),
            ("GPU memory", block.gpu_memory_bytes, gpu_memory),
        ):
            if needed and whole < inf:
                found.append(f"{left / GIB:.3g} of {whole / GIB:.3g} GiB of {what} are left")
        return found

    def _enemy(self, block: BlockDemand) -> str:
        return next(
            other.block_id
            for other in self.blocks.values()
            if block.anti_affinity & _names(other) or other.anti_affinity & _names(block)
        )

    def _count(self, block: BlockDemand, sign: int) -> None:
        self.carry(sign * block.weight)
        for room in self._rooms:
            room.count(block, sign)
        for counted, names in ((self._names, _names(block)), (self._shunned, block.anti_affinity)):
            for name in names:
                counted[name] += sign
                if not counted[name]:
                    del counted[name]


def _names(block: BlockDemand) -> frozenset[str]:
    return block.names | {block.block_id}


def _label(key: str, value: str) -> str:
    return f"{key}={value}" if value else f"the label {key}"


def _too_large(what: str, needed: float, free: float, whole: float) -> str:
    return f"the block needs {needed / GIB:.3g} GiB of {what}, and {free / GIB:.3g} of {whole / GIB:.3g} are free"
