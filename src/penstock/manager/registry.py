"""The blocks of a cluster: which are wanted, and how far each worker is with them. Decides; never acts.

A deployment chooses versions of a model. What served before and was not chosen stays until every worker has what was
chosen; only then does it go. Where what was chosen does not load, it stays for good, or an older version is taken up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from penstock.core.blocks import BlockState

LOADING, READY, FAILED = BlockState.LOADING, BlockState.READY, BlockState.FAILED
UNLOADED, DORMANT = BlockState.UNLOADED, BlockState.DORMANT
SERVABLE = (READY, DORMANT)
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


class Chosen(NamedTuple):
    version: str
    block_id: str


@dataclass(slots=True)
class DeployedBlock:
    block_id: str
    model: str
    version: str
    folder: str
    revision: int
    role: Role = Role.CHOSEN
    is_new: bool = False  # others of its model serve: it is not asked before every worker has it
    replaces: tuple[str, ...] = ()  # those of them that go then
    is_taken_up: bool = False  # it was there to be asked, in memory or dormant, and no longer as a new one
    has_served: bool = False  # it was in some worker's memory since it was deployed
    losses: int = 0  # workers that ended while they loaded it
    workers: dict[str, WorkerState] = field(default_factory=dict)

    @property
    def is_wanted(self) -> bool:
        return self.role is not Role.WITHDRAWN

    @property
    def is_given_up(self) -> bool:
        return self.losses >= MAX_LOSSES

    def state(self) -> tuple[BlockState, str]:
        if not self.is_wanted:
            return UNLOADED, "unloaded"
        if self.is_given_up:
            return FAILED, LOST
        states = {LOADING if self._is_outdated(found) else found.state for found in self.workers.values()}
        reason = self.failure()
        if self.is_new:
            has_failed = FAILED in states and LOADING not in states
            return (FAILED, reason) if has_failed else (LOADING, "loading")
        if any(found.is_serving for found in self.workers.values()):
            return READY, reason and f"serves, but was not loaded anew: {reason}"
        if DORMANT in states:
            return DORMANT, ""
        return (FAILED, reason) if states == {FAILED} else (LOADING, "loading")

    def failure(self) -> str:
        """Why some worker could not load its newest revision; empty: none failed."""
        if self.is_given_up:
            return LOST
        failed = [found for found in self.workers.values() if found.state is FAILED and not self._is_outdated(found)]
        return failed[0].reason if failed else ""

    def _is_outdated(self, found: WorkerState) -> bool:
        """The worker has not yet said how the newest revision of what failed is."""
        return found.state is FAILED and found.revision < self.revision

    def withdraw(self) -> None:
        self.role, self.is_taken_up, self.has_served, self.losses = Role.WITHDRAWN, False, False, 0
        self.is_new, self.replaces = False, ()


class Registry:
    def __init__(self) -> None:
        self._blocks: dict[str, DeployedBlock] = {}
        self._models: dict[str, list[DeployedBlock]] = {}  # the same by model
        self._spares: dict[str, list[Chosen]] = {}  # by model: what may stand in where nothing serves, best first
        self._workers: set[str] = set()
        self._revision = 0

    def blocks(self) -> list[DeployedBlock]:
        return list(self._blocks.values())

    def assigned(self) -> list[DeployedBlock]:
        """What every worker should hold; what is new comes last."""
        wanted = [block for block in self._blocks.values() if block.is_wanted and not block.is_given_up]
        return sorted(wanted, key=lambda block: block.is_new)

    def of_model(self, model: str) -> list[DeployedBlock]:
        return self._models.get(model, [])

    def deploy(self, model: str, folder: str, versions: Sequence[Chosen], spares: Sequence[Chosen] = ()) -> int:
        """These versions of the model are wanted, loaded anew where they were; its others go when these are there."""
        self._revision += 1
        self._spares[model] = list(spares)
        chosen = {each.block_id for each in versions}
        for block in self.of_model(model):
            if block.block_id in chosen:
                continue
            if block.is_wanted and block.is_taken_up:
                block.role = Role.STANDS_IN
            else:
                block.withdraw()
        for each in versions:
            self._want(each, model, folder, Role.CHOSEN)
        self._link(model)
        return self._revision

    def withdraw(self, model: str) -> None:
        self._spares.pop(model, None)
        for block in self.of_model(model):
            block.withdraw()

    def worker_reported(self, worker: str, states: Iterable[tuple[str, WorkerState]]) -> bool:
        """Returns whether anything changed."""
        is_first = worker not in self._workers
        self._workers.add(worker)
        changed = set(self._models) if is_first else set()
        reported = dict(states)
        for block in self._blocks.values():
            new = reported.get(block.block_id)
            if block.workers.get(worker) == new:
                continue
            changed.add(block.model)
            if new is None:
                del block.workers[worker]
                continue
            block.workers[worker] = new
            if block.is_wanted and not block.is_new and (new.is_serving or new.state is DORMANT):
                block.is_taken_up = True
            block.has_served = block.has_served or (block.is_wanted and new.is_serving)
        self._advance(changed)
        return is_first or bool(changed)

    def worker_left(self, worker: str) -> None:
        was_here = worker in self._workers
        self._workers.discard(worker)
        for block in self._blocks.values():
            left = block.workers.pop(worker, None)
            has_answered = left is not None and left.state is not LOADING and left.revision >= block.revision
            if block.is_new and was_here and not has_answered:
                block.losses += 1
        self._advance(self._models)

    def is_settled(self, model: str) -> bool:
        """Every worker has answered the newest revision of what was chosen, well or badly; what went has gone."""
        return self.has_answered(model) and not any(
            block.workers for block in self.of_model(model) if not block.is_wanted
        )

    def has_answered(self, model: str) -> bool:
        blocks = [block for block in self.of_model(model) if block.role is Role.CHOSEN]
        return bool(self._workers) and all(map(self._is_answered, blocks))

    def failure(self, model: str) -> str:
        """Which version of the newest deployment did not load on some worker, and why; empty: all did."""
        for block in self.of_model(model):
            if block.role is Role.CHOSEN and (reason := block.failure()):
                serving = [other.version for other in self.of_model(model) if other.state()[0] in SERVABLE]
                consolation = f"; what served before serves on (version {', '.join(serving)})" if serving else ""
                return f"version {block.version} failed to load: {reason}{consolation}"
        return ""

    # --- how it follows

    def _want(self, chosen: Chosen, model: str, folder: str, role: Role) -> None:
        known = self._blocks.get(chosen.block_id)
        if known is None:
            known = self._blocks[chosen.block_id] = DeployedBlock(chosen.block_id, model, chosen.version, folder, 0)
            self._models.setdefault(model, []).append(known)
        known.folder, known.revision, known.role, known.losses = folder, self._revision, role, 0

    def _link(self, model: str) -> None:
        blocks = [block for block in self.of_model(model) if block.is_wanted]
        standing_in = tuple(block.block_id for block in blocks if block.role is Role.STANDS_IN)
        has_others = bool(standing_in) or any(block.is_taken_up for block in blocks)
        for block in blocks:
            block.is_new = block.role is Role.CHOSEN and not block.is_taken_up and has_others
            block.replaces = standing_in if block.is_new else ()

    def _advance(self, models: Iterable[str]) -> None:
        for model in models:
            self._take_up(model)
            self._fall_back(model)

    def _take_up(self, model: str) -> None:
        """What is new has arrived: it is asked from now on, and when all of it has, what stood in for it goes."""
        blocks = self.of_model(model)
        chosen = [block for block in blocks if block.role is Role.CHOSEN]
        has_all = all(map(self._has_arrived, chosen))
        for block in blocks:
            if block.role is Role.STANDS_IN and has_all:
                block.withdraw()
            elif block.is_new and (has_all or not block.replaces) and self._has_arrived(block):
                block.is_new, block.replaces, block.is_taken_up = False, (), True

    def _fall_back(self, model: str) -> None:
        """Nothing of the model loads: the next older version is tried."""
        wanted = [block for block in self.of_model(model) if block.is_wanted]
        spares = self._spares.get(model)
        if not spares or not wanted or not all(map(self._has_failed, wanted)):
            return
        self._revision += 1
        self._want(spares.pop(0), model, wanted[0].folder, Role.STANDS_IN)
        self._link(model)

    def _has_failed(self, block: DeployedBlock) -> bool:
        return block.is_given_up or (self._is_answered(block) and block.state()[0] is FAILED)

    def _has_arrived(self, block: DeployedBlock) -> bool:
        return (
            not block.is_given_up
            and self._is_answered(block)
            and all(found.state in SERVABLE for found in block.workers.values())
        )

    def _is_answered(self, block: DeployedBlock) -> bool:
        if block.is_given_up:
            return True
        return (
            bool(self._workers)
            and self._workers == set(block.workers)
            and all(found.revision >= block.revision and found.state is not LOADING for found in block.workers.values())
        )
