"""A deployed block in the manager: the block's record, role and state on each worker. Pure: no I/O."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from penstock.core.blocks import BlockRecord, BlockRole, BlockState
from penstock.manager.placing.sites import BlockDemand

LOADING, READY, FAILED = BlockState.LOADING, BlockState.READY, BlockState.FAILED
UNLOADED, DORMANT = BlockState.UNLOADED, BlockState.DORMANT
# A new version is given up after this number of worker processes have died while loading it.
MAX_LOSSES = 2
LOST_REASON = f"{MAX_LOSSES} worker processes died while loading the version; see their logs, then load the model again"


class Role(Enum):
    CHOSEN = "chosen"  # to serve, by the newest deployment of the model
    STAND_IN = "stand-in"  # serves until the chosen blocks are ready
    WITHDRAWN = "withdrawn"


class WorkerState(NamedTuple):
    state: BlockState  # of the newest revision
    reason: str
    revision: int
    is_serving: bool = False  # this revision or an earlier one
    is_new: bool = False  # the block was assigned as a new block

    @property
    def may_serve(self) -> bool:
        return self.is_serving or self.state is DORMANT


@dataclass(slots=True)
class DeployedBlock:
    block_id: str
    record: BlockRecord
    revision: int
    role: Role = Role.WITHDRAWN
    is_new: bool = False  # other blocks of the model serve until every worker has loaded this block
    replaces: tuple[str, ...] = ()  # the stand-ins that are withdrawn when every worker has loaded this block
    is_in_service: bool = False  # has accepted requests, in memory or dormant, and is not new any more
    has_served: bool = False  # has been in the memory of a worker since the deployment
    is_shown: bool = False  # was wanted during this term, or its model was unloaded by an operator
    is_deleted: bool = False  # the table removes the block when no worker holds it
    losses: int = 0  # worker processes that died while they loaded the block
    workers: dict[str, WorkerState] = field(default_factory=dict)
    demand: BlockDemand = field(init=False)
    is_everywhere: bool = field(init=False)  # every open worker holds the block, without a placement
    _state_counts: Counter[BlockState] = field(default_factory=Counter)  # workers by reported state
    _serving: int = 0  # workers

    def __post_init__(self) -> None:
        self.set_record(self.record, self.revision)

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
    def is_settled(self) -> bool:
        """Return whether no report of a worker can change the block's role."""
        return self.role is Role.CHOSEN and not self.is_new

    def set_record(self, record: BlockRecord, revision: int) -> None:
        if self.revision < revision:
            self.losses = 0
        self.record, self.revision, self.is_deleted = record, revision, False
        self.demand = _build_demand(self.block_id, record)
        self.is_everywhere = self.demand.is_unconstrained
        if record.role is BlockRole.CHOSEN:
            self.role, self.is_shown = Role.CHOSEN, True

    def withdraw(self) -> None:
        self.role, self.is_in_service, self.has_served, self.losses = Role.WITHDRAWN, False, False, 0
        self.is_new, self.replaces = False, ()

    def report(self, worker: str, state: WorkerState | None) -> bool:
        """Set the block's state on a worker (None: not held by the worker); return whether the state changed."""
        before = self.workers.get(worker)
        if before == state:
            return False
        if before is not None:
            self._state_counts[before.state] -= 1
            self._serving -= before.is_serving
        if state is None:
            del self.workers[worker]
            return True
        self.workers[worker] = state
        self._state_counts[state.state] += 1
        self._serving += state.is_serving
        if self.is_wanted:
            self.is_in_service = self.is_in_service or (not self.is_new and state.may_serve)
            self.has_served = self.has_served or state.is_serving
        return True

    def has_load_ended(self, worker: str) -> bool:
        """Return whether the worker has loaded the newest revision, or has failed to load it."""
        found = self.workers.get(worker)
        return found is not None and found.revision >= self.revision and found.state is not LOADING

    def compute_state(self) -> tuple[BlockState, str]:
        if not self.is_wanted:
            return UNLOADED, "unloaded"
        if self.is_given_up:
            return FAILED, LOST_REASON
        reason = self.describe_failure()
        if self._serving and not self.is_new:
            return READY, reason and self._format_partial_failure(reason)
        states = self._list_reported_states()
        if self.is_new:
            has_failed = FAILED in states and LOADING not in states
            return (FAILED, reason) if has_failed else (LOADING, "loading")
        if DORMANT in states:
            # A worker reports a reason if it lacks the memory for the block, but not for a lazy, idle or evicted block.
            return DORMANT, next((each.reason for each in self.workers.values() if each.state is DORMANT), "")
        return (FAILED, reason) if states == {FAILED} else (LOADING, "loading")

    def describe_failure(self) -> str:
        """Return why a worker failed to load the newest revision; empty if no worker failed."""
        if self.is_given_up:
            return LOST_REASON
        if not self._state_counts[FAILED]:
            return ""
        failed = [found for found in self.workers.values() if found.state is FAILED and not self._is_outdated(found)]
        return failed[0].reason if failed else ""

    @property
    def keeps_older_load(self) -> bool:
        """Return whether a worker failed to load the newest revision, but still serves an older revision."""
        return any(found.state is FAILED and found.is_serving for found in self.workers.values())

    def _format_partial_failure(self, reason: str) -> str:
        """Return a message for a block that is still served although a worker failed to load the block."""
        if self.keeps_older_load:
            return f"still serving, but reloading failed: {reason}"
        return f"failed on {self._state_counts[FAILED]} of {len(self.workers)} workers: {reason}"

    def _list_reported_states(self) -> set[BlockState]:
        if not self._state_counts[FAILED]:
            return {state for state, workers in self._state_counts.items() if workers}
        return {LOADING if self._is_outdated(found) else found.state for found in self.workers.values()}

    def _is_outdated(self, worker_state: WorkerState) -> bool:
        """Return whether the worker failed to load an older revision and has not reported on the newest revision."""
        return worker_state.state is FAILED and worker_state.revision < self.revision


def _build_demand(block_id: str, record: BlockRecord) -> BlockDemand:
    pairs = {**record.labels, **{key: value for key, value in record.metadata.items() if isinstance(value, str)}}
    names = {record.model, f"{record.model}:{record.version}", *(f"{key}={value}" for key, value in pairs.items())}
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
