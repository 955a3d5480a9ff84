"""The blocks of a cluster: which are wanted, and how far each worker is with them. Decides; never acts.

A deployment chooses versions of a model. What served before and was not chosen stays until every worker that should
have what was chosen has it; only then does it go. Where what was chosen does not load, it stays for good, or an older
version is taken up. What of this is under way is in no store: a manager that takes over derives it from what the
workers hold, for as long as it adopts them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.core.blocks import SERVABLE, BlockRole, BlockState
from penstock.manager.deployed_block import DeployedBlock, Role, WorkerState
from penstock.manager.desired import DesiredBlock


@dataclass(slots=True)
class Touched:
    """For whom something is another."""

    models: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)  # models: how far workers are, and nothing else
    workers: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.models or self.states or self.workers)


class Registry:
    def __init__(self, is_adopting: bool = False) -> None:
        """`is_adopting`: workers may come that an earlier manager told what to hold."""
        self._blocks: dict[str, DeployedBlock] = {}
        self._models: dict[str, list[DeployedBlock]] = {}  # the same by model
        self._workers: frozenset[str] = frozenset()  # that are attached
        self._held: dict[str, set[str]] = {}  # by worker that is attached, the blocks that it holds
        self._closed: frozenset[str] = frozenset()  # workers that should hold nothing
        self._open: frozenset[str] = frozenset()  # those that are attached and may hold something
        self._placed: Mapping[str, Collection[str]] = {}  # of blocks that are not everywhere
        self._interrupted: dict[str, set[str]] = {}  # by worker that is away: new blocks that it was loading
        self.is_adopting = is_adopting
        self._adopted: set[str] = set()  # models of which something is under way, by what workers hold
        self._touched = Touched()

    def blocks(self) -> list[DeployedBlock]:
        return list(self._blocks.values())

    def shown(self) -> list[DeployedBlock]:
        return [block for block in self._blocks.values() if block.is_shown]

    def get(self, block_id: str) -> DeployedBlock | None:
        return self._blocks.get(block_id)

    def assigned(self) -> list[DeployedBlock]:
        """What workers should hold; what is new comes last."""
        wanted = [block for block in self._blocks.values() if block.is_assigned]
        return sorted(wanted, key=lambda block: block.is_new)

    def of_model(self, model: str) -> list[DeployedBlock]:
        return self._models.get(model, [])

    def workers(self) -> frozenset[str]:
        return self._workers

    def targets(self, block: DeployedBlock) -> frozenset[str]:
        """The attached workers that should hold it."""
        if block.is_everywhere:
            return self._open
        if self.is_adopting:
            # Until everybody has had the time to come, all keep what they hold, and nobody gets another's.
            return frozenset(block.workers)
        return self._workers.intersection(self._placed.get(block.block_id, ()))

    def assigned_to(self, block: DeployedBlock) -> frozenset[str]:
        """Who is to hold it now: also those who serve it, for as long as not all have it who should."""
        if not block.is_assigned:
            return frozenset()
        targets = self.targets(block)
        if not self._has_strays(block, targets) or self._has_arrived(block):
            return targets
        return targets | {worker for worker, found in block.workers.items() if found.may_serve}

    def take_touched(self) -> Touched:
        """Since this was last asked."""
        touched, self._touched = self._touched, Touched()
        return touched

    # --- what happens

    def apply(self, model: str, desired: Sequence[DesiredBlock]) -> None:
        """These are the records of the model's blocks, and there are no others."""
        self._touched.models.add(model)
        present = {each.block_id for each in desired}
        for each in desired:
            block = self._blocks.get(each.block_id)
            if block is None:
                block = self._blocks[each.block_id] = DeployedBlock(each.block_id, each.record, each.revision)
                self._models.setdefault(model, []).append(block)
            else:
                block.take(each.record, each.revision)
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
        self._touched.models.add(model)

    def place(self, placed: Mapping[str, Collection[str]]) -> None:
        """Which workers should hold the blocks that are not everywhere."""
        before, self._placed = self._placed, placed
        for block_id in before.keys() | placed.keys():
            block = self._blocks.get(block_id)
            if block is not None and before.get(block_id) != placed.get(block_id):
                self._touched.models.add(block.model)
        self._advance(self._touched.models)

    def close(self, workers: Iterable[str]) -> None:
        """These should hold nothing: what they have goes to others."""
        before, self._closed = self._closed, frozenset(workers)
        if before != self._closed:
            self._open = self._workers - self._closed
            self._touched.models |= self._models.keys()
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
            self._held[worker] = set()
            self._interrupted.pop(worker, None)
            self._touched.workers.add(worker)
            if self.is_adopting:
                self._adopt(reported)
        elif is_snapshot:
            reported = {**dict.fromkeys(self._held[worker] - reported.keys()), **reported}
        changed = self._hear(worker, reported)
        self._advance(changed)
        return is_first or bool(changed)

    def worker_detached(self, worker: str) -> None:
        """Nothing is heard of it: it may serve on, and come back."""
        if worker not in self._workers:
            return
        new = [block for block in self._blocks.values() if block.is_new and worker in self.targets(block)]
        self._interrupted[worker] = {block.block_id for block in new if not block.has_answered(worker)}
        self._attached(self._workers - {worker})
        self._touched.workers.add(worker)
        for block in map(self._blocks.__getitem__, self._held.pop(worker)):
            block.hear(worker, None)
            self._touched.models.add(block.model)
        self._advance(self._models)

    def worker_left(self, worker: str) -> None:
        """Its process has ended."""
        self.worker_detached(worker)
        for block_id in self._interrupted.pop(worker, ()):
            block = self._blocks.get(block_id)
            if block is not None and block.is_new:
                block.losses += 1
                self._touched.models.add(block.model)
        self._advance(self._models)

    def worker_forgotten(self, worker: str) -> None:
        """It left, or nobody waits for it any more."""
        self._interrupted.pop(worker, None)

    def end_adoption(self) -> None:
        """Whoever an earlier manager had told something has come, or has ended."""
        self._placed = {block.block_id: tuple(block.workers) for block in self.assigned() if not block.is_everywhere}
        self.is_adopting = False
        adopted, self._adopted = self._adopted, set()
        self._touched.models |= adopted
        self._advance(adopted)

    # --- how far it is

    def has_gone(self, model: str) -> bool:
        """What is not wanted of it any more, no worker has."""
        return not any(block.workers for block in self.of_model(model) if not block.is_wanted)

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

    def _attached(self, workers: Iterable[str]) -> None:
        self._workers = frozenset(workers)
        self._open = self._workers - self._closed

    def _hear(self, worker: str, reported: Mapping[str, WorkerState | None]) -> set[str]:
        """The models of which anything is another."""
        changed, held = set(), self._held[worker]
        for block_id, said in reported.items():
            block = self._blocks.get(block_id)
            if block is None or not block.hear(worker, said):
                continue
            (held.discard if said is None else held.add)(block_id)
            changed.add(block.model)
            is_assignment = self._is_assigned_by_reports(block, worker)
            (self._touched.models if is_assignment else self._touched.states).add(block.model)
        return changed

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
                block.is_taken_up = found.may_serve
                models.add(block.model)
            elif block.role is Role.CHOSEN and found.is_new and not block.is_taken_up:
                block.is_new = True
                models.add(block.model)
        self._adopted |= models
        self._touched.models |= models
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
            if all(block.is_at_rest for block in self.of_model(model)):
                continue
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
                self._touched.models.add(model)
            elif block.is_new and (has_all or not block.replaces) and self._has_arrived(block):
                block.is_new, block.replaces, block.is_taken_up = False, (), True
                self._touched.models.add(model)

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
        self._touched.models.add(model)
        self._link(model)

    def _forget(self, model: str) -> None:
        for block in [block for block in self.of_model(model) if block.is_deleted and not block.workers]:
            del self._blocks[block.block_id]
            self._models[model].remove(block)
            self._touched.models.add(model)

    def _has_strays(self, block: DeployedBlock, targets: frozenset[str]) -> bool:
        """Somebody may hold it who should not."""
        return bool(self._closed) if block.is_everywhere else not block.workers.keys() <= targets

    def _is_assigned_by_reports(self, block: DeployedBlock, worker: str) -> bool:
        """What the worker says of it may say who is to hold it."""
        targets = self.targets(block)
        is_adopted = self.is_adopting and not block.is_everywhere
        return is_adopted or worker not in targets or self._has_strays(block, targets)

    def _has_failed(self, block: DeployedBlock) -> bool:
        return block.is_given_up or (block.state()[0] is BlockState.FAILED and self._is_answered(block))

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
