"""A block as the manager has it: what is wanted of it, and how far each worker is with it. Decides; never acts."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from penstock.core.blocks import BlockRecord, BlockRole, BlockState
from penstock.manager.placing.sites import BlockDemand

LOADING, READY, FAILED = BlockState.LOADING, BlockState.READY, BlockState.FAILED
UNLOADED, DORMANT = BlockState.UNLOADED, BlockState.DORMANT
# Workers that may end while they load a version that another stands in for, before it is given up.
MAX_LOSSES = 2
LOST = "worker processes ended while they loaded it; see the log, and load it again"


class Role(Enum):
    CHOSEN = "chosen"  # by the newest deployment of its model
    STANDS_IN = "stands in"  # until the chosen ones are ready
    WITHDRAWN = "withdrawn"


class WorkerState(NamedTuple):
    state: BlockState  # of the newest revision
    reason: str
    revision: int
    is_serving: bool = False  # that revision, or an earlier one
    is_new: bool = False  # it was assigned so

    @property
    def may_serve(self) -> bool:
        return self.is_serving or self.state is DORMANT


@dataclass(slots=True)
class DeployedBlock:
    block_id: str
    record: BlockRecord
    revision: int
    role: Role = Role.WITHDRAWN
    is_new: bool = False  # others of its model serve: it is not asked before every worker has it
    replaces: tuple[str, ...] = ()  # those of them that go then
    is_taken_up: bool = False  # it was there to be asked, in memory or dormant, and no longer as a new one
    has_served: bool = False  # it was in some worker's memory since it was deployed
    is_shown: bool = False  # it was wanted in this life of the manager, or its model was unloaded
    is_deleted: bool = False  # it goes when nobody holds it
    losses: int = 0  # workers that ended while they loaded it
    workers: dict[str, WorkerState] = field(default_factory=dict)
    demand: BlockDemand = field(init=False)
    is_everywhere: bool = field(init=False)  # every worker that takes anything has it, without a placement
    _tally: Counter[BlockState] = field(default_factory=Counter)  # workers by what they say
    _serving: int = 0  # workers

    def __post_init__(self) -> None:
        self.take(self.record, self.revision)

    @property
    def model(self) -> str:
        return self.record.model

    @property
    def version(self) -> str:
        return self.record.version

    @property
    def folder(self) -> str:
        return self.record.source

    @property
    def is_wanted(self) -> bool:
        return self.role is not Role.WITHDRAWN

    @property
    def is_given_up(self) -> bool:
        return self.losses >= MAX_LOSSES

    @property
    def is_assigned(self) -> bool:
        return self.is_wanted and not self.is_given_up

    @property
    def is_at_rest(self) -> bool:
        """Whatever workers say, it stays as it is."""
        return self.role is Role.CHOSEN and not self.is_new

    def take(self, record: BlockRecord, revision: int) -> None:
        """This is wanted of it now."""
        if self.revision < revision:
            self.losses = 0
        self.record, self.revision, self.is_deleted = record, revision, False
        self.demand = _demand(self.block_id, record)
        self.is_everywhere = self.demand.is_plain
        if record.role is BlockRole.CHOSEN:
            self.role, self.is_shown = Role.CHOSEN, True

    def withdraw(self) -> None:
        self.role, self.is_taken_up, self.has_served, self.losses = Role.WITHDRAWN, False, False, 0
        self.is_new, self.replaces = False, ()

    def hear(self, worker: str, said: WorkerState | None) -> bool:
        """How far the worker is with it; None: it does not hold it. Returns whether that is another than before."""
        before = self.workers.get(worker)
        if before == said:
            return False
        if before is not None:
            self._tally[before.state] -= 1
            self._serving -= before.is_serving
        if said is None:
            del self.workers[worker]
            return True
        self.workers[worker] = said
        self._tally[said.state] += 1
        self._serving += said.is_serving
        if self.is_wanted:
            self.is_taken_up = self.is_taken_up or (not self.is_new and said.may_serve)
            self.has_served = self.has_served or said.is_serving
        return True

    def has_answered(self, worker: str) -> bool:
        found = self.workers.get(worker)
        return found is not None and found.revision >= self.revision and found.state is not LOADING

    def state(self) -> tuple[BlockState, str]:
        if not self.is_wanted:
            return UNLOADED, "unloaded"
        if self.is_given_up:
            return FAILED, LOST
        reason = self.failure()
        if self._serving and not self.is_new:
            return READY, reason and f"serves, but was not loaded anew: {reason}"
        states = self._states()
        if self.is_new:
            has_failed = FAILED in states and LOADING not in states
            return (FAILED, reason) if has_failed else (LOADING, "loading")
        if DORMANT in states:
            # Lazy, idle or evicted ones have no reason; what found no room says so.
            return DORMANT, next((each.reason for each in self.workers.values() if each.state is DORMANT), "")
        return (FAILED, reason) if states == {FAILED} else (LOADING, "loading")

    def failure(self) -> str:
        """Why some worker could not load its newest revision; empty: none failed."""
        if self.is_given_up:
            return LOST
        if not self._tally[FAILED]:
            return ""
        failed = [found for found in self.workers.values() if found.state is FAILED and not self._is_outdated(found)]
        return failed[0].reason if failed else ""

    def _states(self) -> set[BlockState]:
        if not self._tally[FAILED]:
            return {state for state, workers in self._tally.items() if workers}
        return {LOADING if self._is_outdated(found) else found.state for found in self.workers.values()}

    def _is_outdated(self, found: WorkerState) -> bool:
        """The worker has not yet said how the newest revision of what failed is."""
        return found.state is FAILED and found.revision < self.revision


def _demand(block_id: str, record: BlockRecord) -> BlockDemand:
    told = {**record.labels, **{key: value for key, value in record.metadata.items() if isinstance(value, str)}}
    names = {record.model, f"{record.model}:{record.version}", *(f"{key}={value}" for key, value in told.items())}
    return BlockDemand(
        block_id,
        replicas=record.replicas,
        cpu=record.resources.cpu,
        memory_bytes=record.resources.memory_bytes,
        gpu_memory_bytes=record.resources.gpu_memory_bytes,
        labels=record.labels,
        anti_affinity=frozenset(record.anti_affinity),
        names=frozenset(names),
        weight=record.weight,
    )
