"""The blocks of a cluster: which are wanted, and how far each worker is with them. Decides; never acts.

A deployment chooses versions of a model. What served before and was not chosen stays until every worker that should
have what was chosen has it; only then does it go. Where what was chosen does not load, it stays for good, or an older
version is taken up. What of this is under way is in no store: a manager that takes over derives it from what the
workers hold, for as long as it adopts them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from penstock.core.blocks import BlockRecord, BlockRole, BlockState, Resources
from penstock.manager.desired import DesiredBlock

LOADING, READY, FAILED = BlockState.LOADING, BlockState.READY, BlockState.FAILED
UNLOADED, DORMANT = BlockState.UNLOADED, BlockState.DORMANT
SERVABLE = (READY, DORMANT)
# Workers that may end while they load a version that another stands in for, before it is given up.
MAX_LOSSES = 2
NOTHING = Resources()
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
    def is_everywhere(self) -> bool:
        """Every worker that takes anything has it, without a placement."""
        record = self.record
        return not (record.replicas or record.labels or record.anti_affinity) and record.resources == NOTHING

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

    def has_answered(self, worker: str) -> bool:
        found = self.workers.get(worker)
        return found is not None and found.revision >= self.revision and found.state is not LOADING

    def withdraw(self) -> None:
        self.role, self.is_taken_up, self.has_served, self.losses = Role.WITHDRAWN, False, False, 0
        self.is_new, self.replaces = False, ()


class Registry:
    def __init__(self, is_adopting: bool = False) -> None:
        """`is_adopting`: workers may come that an earlier manager told what to hold."""
        self._blocks: dict[str, DeployedBlock] = {}
        self._models: dict[str, list[DeployedBlock]] = {}  # the same by model
        self._workers: frozenset[str] = frozenset()  # that are attached
        self._closed: frozenset[str] = frozenset()  # workers that should hold nothing
        self._open: frozenset[str] = frozenset()  # those that are attached and may hold something
        self._placed: Mapping[str, Collection[str]] = {}  # of blocks that are not everywhere
        self._interrupted: dict[str, set[str]] = {}  # by worker that is away: new blocks that it was loading
        self._is_adopting = is_adopting
        self._adopted: set[str] = set()  # models of which something is under way, by what workers hold
        self._touched: set[str] = set()  # models
        self._touched_workers: set[str] = set()

    def blocks(self) -> list[DeployedBlock]:
        return list(self._blocks.values())

    def shown(self) -> list[DeployedBlock]:
        return [block for block in self._blocks.values() if block.is_shown]

    def get(self, block_id: str) -> DeployedBlock | None:
        return self._blocks.get(block_id)

    def assigned(self) -> list[DeployedBlock]:
        """What workers should hold; what is new comes last."""
        wanted = [block for block in self._blocks.values() if self._is_assigned(block)]
        return sorted(wanted, key=lambda block: block.is_new)

    def of_model(self, model: str) -> list[DeployedBlock]:
        return self._models.get(model, [])

    def workers(self) -> frozenset[str]:
        return self._workers

    def is_taken_up(self, block_id: str) -> bool:
        block = self._blocks.get(block_id)
        return block is not None and block.is_wanted and block.is_taken_up

    def targets(self, block: DeployedBlock) -> frozenset[str]:
        """The attached workers that should hold it."""
        if block.is_everywhere:
            return self._open
        return self._workers.intersection(self._placed.get(block.block_id, ()))

    def assigned_to(self, block: DeployedBlock) -> frozenset[str]:
        """Who is to hold it now: also those who serve it, for as long as not all have it who should."""
        if not self._is_assigned(block):
            return frozenset()
        targets = self.targets(block)
        if block.workers.keys() <= targets or self._has_arrived(block):
            return targets
        return targets | {
            worker for worker, found in block.workers.items() if found.is_serving or found.state is DORMANT
        }

    def take_touched(self) -> tuple[set[str], set[str]]:
        """The models and the workers for which something is another since this was last asked."""
        models, workers = self._touched, self._touched_workers
        self._touched, self._touched_workers = set(), set()
        return models, workers

    # --- what happens

    def apply(self, model: str, desired: Sequence[DesiredBlock]) -> None:
        """These are the records of the model's blocks, and there are no others."""
        self._touched.add(model)
        present = {each.block_id for each in desired}
        for each in desired:
            self._take_record(each)
        for block in self.of_model(model):
            if block.block_id not in present:
                block.withdraw()
                block.is_deleted = True
        has_chosen = any(each.record.role is BlockRole.CHOSEN for each in desired)
        for block in self.of_model(model):
            if block.is_deleted or block.record.role is BlockRole.CHOSEN:
                continue
            if has_chosen and block.is_wanted and block.is_taken_up:
                block.role = Role.STANDS_IN
            else:
                block.withdraw()
            block.is_shown = block.is_shown or (not has_chosen and block.record.role is BlockRole.WITHDRAWN)
        self._link(model)
        self._advance([model])

    def touch(self, model: str) -> None:
        """What is told of it is another."""
        self._touched.add(model)

    def place(self, placed: Mapping[str, Collection[str]]) -> None:
        """Which workers should hold the blocks that are not everywhere."""
        before, self._placed = self._placed, placed
        for block_id in before.keys() | placed.keys():
            block = self._blocks.get(block_id)
            if block is not None and set(before.get(block_id, ())) != set(placed.get(block_id, ())):
                self._touched.add(block.model)
        self._advance(self._touched)

    def close(self, workers: Iterable[str]) -> None:
        """These should hold nothing: what they have goes to others."""
        before, self._closed = self._closed, frozenset(workers)
        if before != self._closed:
            self._open = self._workers - self._closed
            self._touched |= set(self._models)
            self._advance(self._models)

    def worker_reported(
        self,
        worker: str,
        states: Iterable[tuple[str, WorkerState]],
        removed: Iterable[str] = (),
        is_snapshot: bool = True,
    ) -> bool:
        """Returns whether anything changed."""
        is_first = worker not in self._workers
        reported: dict[str, WorkerState | None] = dict.fromkeys(removed)
        reported.update(states)
        if is_first:
            self._attached({*self._workers, worker})
            self._interrupted.pop(worker, None)
            self._touched_workers.add(worker)
            if self._is_adopting:
                self._adopt(reported)
        if is_snapshot:
            held = [block.block_id for block in self._blocks.values() if worker in block.workers]
            reported = {**dict.fromkeys(held), **reported}
        changed = {block.model for block_id, new in reported.items() if (block := self._report(worker, block_id, new))}
        self._touched |= changed
        self._advance(self._models if is_first else changed)
        return is_first or bool(changed)

    def worker_detached(self, worker: str) -> None:
        """Nothing is heard of it: it may serve on, and come back."""
        if worker not in self._workers:
            return
        loading = {
            block.block_id
            for block in self._blocks.values()
            if block.is_new and not block.has_answered(worker) and worker in self.targets(block)
        }
        self._interrupted[worker] = loading
        self._attached(self._workers - {worker})
        self._touched_workers.add(worker)
        for block in self._blocks.values():
            if block.workers.pop(worker, None) is not None:
                self._touched.add(block.model)
        self._advance(self._models)

    def worker_left(self, worker: str) -> None:
        """Its process has ended."""
        self.worker_detached(worker)
        interrupted = [self._blocks.get(block_id) for block_id in self._interrupted.pop(worker, ())]
        for block in interrupted:
            if block is not None and block.is_new:
                block.losses += 1
                self._touched.add(block.model)
        self._advance(self._models)

    def worker_forgotten(self, worker: str) -> None:
        """It left, or nobody waits for it any more."""
        self._interrupted.pop(worker, None)

    def end_adoption(self) -> None:
        """Whoever an earlier manager had told something has come, or has ended."""
        self._is_adopting = False
        adopted, self._adopted = self._adopted, set()
        self._touched |= adopted
        self._advance(adopted)

    # --- how far it is

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

    def _take_record(self, desired: DesiredBlock) -> None:
        block = self._blocks.get(desired.block_id)
        if block is None:
            block = self._blocks[desired.block_id] = DeployedBlock(desired.block_id, desired.record, desired.revision)
            self._models.setdefault(block.model, []).append(block)
        if block.revision < desired.revision:
            block.losses = 0
        block.record, block.revision, block.is_deleted = desired.record, desired.revision, False
        if desired.record.role is BlockRole.CHOSEN:
            block.role, block.is_shown = Role.CHOSEN, True

    def _attached(self, workers: Iterable[str]) -> None:
        self._workers = frozenset(workers)
        self._open = self._workers - self._closed

    def _report(self, worker: str, block_id: str, new: WorkerState | None) -> DeployedBlock | None:
        """The block, where it is another now."""
        block = self._blocks.get(block_id)
        if block is None or block.workers.get(worker) == new:
            return None
        if new is None:
            del block.workers[worker]
            return block
        block.workers[worker] = new
        if block.is_wanted and not block.is_new and (new.is_serving or new.state is DORMANT):
            block.is_taken_up = True
        block.has_served = block.has_served or (block.is_wanted and new.is_serving)
        return block

    def _adopt(self, reported: Mapping[str, WorkerState | None]) -> None:
        """What an earlier manager had under way goes on: what stood in stands in, and what was new is new."""
        models = set()
        for block_id, found in reported.items():
            block = self._blocks.get(block_id)
            if block is None or found is None or block.is_deleted:
                continue
            has_chosen = any(other.role is Role.CHOSEN for other in self.of_model(block.model))
            if has_chosen and not block.is_wanted:
                block.role, block.is_shown = Role.STANDS_IN, True
                block.is_taken_up = found.is_serving or found.state is DORMANT
                models.add(block.model)
            elif block.role is Role.CHOSEN and found.is_new and not block.is_taken_up:
                block.is_new = True
                models.add(block.model)
        self._adopted |= models
        for model in models:
            self._link(model)

    def _link(self, model: str) -> None:
        blocks = [block for block in self.of_model(model) if block.is_wanted]
        standing_in = tuple(block.block_id for block in blocks if block.role is Role.STANDS_IN)
        has_others = bool(standing_in) or any(block.is_taken_up for block in blocks)
        for block in blocks:
            block.is_new = block.role is Role.CHOSEN and not block.is_taken_up and has_others
            block.replaces = standing_in if block.is_new else ()

    def _advance(self, models: Iterable[str]) -> None:
        for model in list(models):
            if model not in self._adopted:
                self._take_up(model)
            self._fall_back(model)
            self._forget(model)

    def _take_up(self, model: str) -> None:
        """What is new has arrived: it is asked from now on, and when all of it has, what stood in for it goes."""
        blocks = self.of_model(model)
        if not any(block.is_new or block.role is Role.STANDS_IN for block in blocks):
            return
        chosen = [block for block in blocks if block.role is Role.CHOSEN]
        has_all = all(map(self._has_arrived, chosen))
        for block in blocks:
            if block.role is Role.STANDS_IN and has_all:
                block.withdraw()
                self._touched.add(model)
            elif block.is_new and (has_all or not block.replaces) and self._has_arrived(block):
                block.is_new, block.replaces, block.is_taken_up = False, (), True
                self._touched.add(model)

    def _fall_back(self, model: str) -> None:
        """Nothing of the model loads: the next older version is tried."""
        blocks = self.of_model(model)
        spares = [block for block in blocks if not block.is_wanted and block.record.role is BlockRole.SPARE]
        spares = [block for block in spares if block.folder and not block.is_deleted]
        wanted = [block for block in blocks if block.is_wanted]
        if not spares or not wanted or not all(map(self._has_failed, wanted)):
            return
        spare = max(spares, key=lambda block: int(block.version))
        spare.role, spare.is_shown, spare.losses = Role.STANDS_IN, True, 0
        self._touched.add(model)
        self._link(model)

    def _forget(self, model: str) -> None:
        for block in [block for block in self.of_model(model) if block.is_deleted and not block.workers]:
            del self._blocks[block.block_id]
            self._models[model].remove(block)
            self._touched.add(model)

    def _is_assigned(self, block: DeployedBlock) -> bool:
        return block.is_wanted and not block.is_given_up

    def _has_failed(self, block: DeployedBlock) -> bool:
        return block.is_given_up or (block.state()[0] is FAILED and self._is_answered(block))

    def _has_arrived(self, block: DeployedBlock) -> bool:
        return (
            not block.is_given_up
            and self._is_answered(block)
            and all(block.workers[worker].state in SERVABLE for worker in self.targets(block))
        )

    def _is_answered(self, block: DeployedBlock) -> bool:
        if block.is_given_up:
            return True
        targets = self.targets(block)
        return bool(targets) and all(map(block.has_answered, targets))
