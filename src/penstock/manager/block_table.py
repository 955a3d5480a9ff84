"""A table of a cluster's blocks (deployed model versions), with the state of each block on each worker. Pure: no I/O.

A deployment chooses versions of a model. The versions that served before become stand-ins: they serve until every
worker that should hold the chosen versions has loaded them. If the chosen versions fail to load, the stand-ins keep
serving, or an older version is loaded. This progress is not stored: a manager that takes over derives it from the
blocks that workers hold, while it adopts the workers.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.core.blocks import SERVABLE, BlockRole, BlockState
from penstock.manager.deployed_block import DeployedBlock, Role, WorkerState
from penstock.manager.desired_state import DesiredBlock


@dataclass(slots=True)
class TableChanges:
    models: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)  # models for which only the workers' progress changed
    workers: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.models or self.states or self.workers)


class BlockTable:
    def __init__(self, is_adopting: bool = False) -> None:
        """Create an empty table. `is_adopting`: workers that attach may hold blocks that an earlier leader assigned."""
        self._blocks: dict[str, DeployedBlock] = {}
        self._models: dict[str, list[DeployedBlock]] = {}  # blocks by model
        self._workers: frozenset[str] = frozenset()  # attached workers
        self._held: dict[str, set[str]] = {}  # by attached worker, the blocks that the worker holds
        self._closed: frozenset[str] = frozenset()  # workers that should hold no blocks
        self._open: frozenset[str] = frozenset()  # attached workers that may hold blocks
        self._placed: Mapping[str, Collection[str]] = {}  # workers by block, for blocks that are not on every worker
        self._interrupted: dict[str, set[str]] = {}  # by detached worker: new blocks that the worker was loading
        self.is_adopting = is_adopting
        self._adopted: set[str] = set()  # models with an unfinished change, derived from the blocks that workers hold
        self._changes = TableChanges()

    def list_blocks(self) -> list[DeployedBlock]:
        return list(self._blocks.values())

    def list_shown_blocks(self) -> list[DeployedBlock]:
        return [block for block in self._blocks.values() if block.is_shown]

    def get(self, block_id: str) -> DeployedBlock | None:
        return self._blocks.get(block_id)

    def list_assigned_blocks(self) -> list[DeployedBlock]:
        """Return the blocks that workers should hold; new blocks come last."""
        wanted = [block for block in self._blocks.values() if block.is_assigned]
        return sorted(wanted, key=lambda block: block.is_new)

    def list_model_blocks(self, model: str) -> list[DeployedBlock]:
        return self._models.get(model, [])

    def list_workers(self) -> frozenset[str]:
        return self._workers

    def find_target_workers(self, block: DeployedBlock) -> frozenset[str]:
        """Return the attached workers that should hold the block."""
        if block.is_everywhere:
            return self._open
        if self.is_adopting:
            # Until all workers have had time to attach, each worker keeps its blocks and gets no further blocks.
            return frozenset(block.workers)
        return self._workers.intersection(self._placed.get(block.block_id, ()))

    def find_assigned_workers(self, block: DeployedBlock) -> frozenset[str]:
        """Return the workers that are assigned the block now.

        Workers that serve the block stay assigned until the block is served by every worker that should hold it.
        """
        if not block.is_assigned:
            return frozenset()
        targets = self.find_target_workers(block)
        if not self._may_be_misplaced(block, targets) or self._is_loaded(block):
            return targets
        return targets | {worker for worker, found in block.workers.items() if found.may_serve}

    def take_changes(self) -> TableChanges:
        """Return the changes since the last call, and forget them."""
        changes, self._changes = self._changes, TableChanges()
        return changes

    # --- events

    def apply(self, model: str, desired: Sequence[DesiredBlock]) -> None:
        self._changes.models.add(model)
        present = {each.block_id for each in desired}
        for each in desired:
            block = self._blocks.get(each.block_id)
            if block is None:
                block = self._blocks[each.block_id] = DeployedBlock(each.block_id, each.record, each.revision)
                self._models.setdefault(model, []).append(block)
            else:
                block.set_record(each.record, each.revision)
        for block in self.list_model_blocks(model):
            if block.block_id not in present:
                block.withdraw()
                block.is_deleted = True
        has_chosen = any(each.record.role is BlockRole.CHOSEN for each in desired)
        for block in self.list_model_blocks(model):
            if block.is_deleted or block.record.role is BlockRole.CHOSEN:
                continue
            if has_chosen and block.is_wanted and block.is_in_service:
                block.role = Role.STAND_IN
            else:
                block.withdraw()
            block.is_shown = block.is_shown or (not has_chosen and block.record.role is BlockRole.WITHDRAWN)
        self._set_replacements(model)
        self._advance_deployments([model])

    def mark_stale(self, model: str) -> None:
        """Mark the model's published view as stale."""
        self._changes.models.add(model)

    def set_placement(self, placed: Mapping[str, Collection[str]]) -> None:
        """Set which workers should hold the blocks that are not on every worker."""
        before, self._placed = self._placed, placed
        for block_id in before.keys() | placed.keys():
            block = self._blocks.get(block_id)
            if block is not None and before.get(block_id) != placed.get(block_id):
                self._changes.models.add(block.model)
        self._advance_deployments(self._changes.models)

    def set_excluded_workers(self, workers: Iterable[str]) -> None:
        """Set the workers that should hold no blocks; their blocks move to other workers."""
        before, self._closed = self._closed, frozenset(workers)
        if before != self._closed:
            self._open = self._workers - self._closed
            self._changes.models |= self._models.keys()
            self._advance_deployments(self._models)

    def worker_reported(
        self,
        worker: str,
        states: Iterable[tuple[str, WorkerState]],
        removed: Iterable[str] = (),
        is_snapshot: bool = True,
    ) -> bool:
        """Apply a worker's report of its blocks; return whether anything changed."""
        is_first = worker not in self._workers
        reported: dict[str, WorkerState | None] = dict.fromkeys(removed)
        reported.update(states)
        if is_first:
            self._set_workers({*self._workers, worker})
            self._held[worker] = set()
            self._interrupted.pop(worker, None)
            self._changes.workers.add(worker)
            if self.is_adopting:
                self._adopt_report(reported)
        elif is_snapshot:
            reported = {**dict.fromkeys(self._held[worker] - reported.keys()), **reported}
        changed = self._apply_report(worker, reported)
        self._advance_deployments(changed)
        return is_first or bool(changed)

    def worker_detached(self, worker: str) -> None:
        """Remove a worker whose connection to the manager ended; the worker may still serve, and may attach again."""
        if worker not in self._workers:
            return
        new = [block for block in self._blocks.values() if block.is_new and worker in self.find_target_workers(block)]
        self._interrupted[worker] = {block.block_id for block in new if not block.has_load_ended(worker)}
        self._set_workers(self._workers - {worker})
        self._changes.workers.add(worker)
        for block in map(self._blocks.__getitem__, self._held.pop(worker)):
            block.report(worker, None)
            self._changes.models.add(block.model)
        self._advance_deployments(self._models)

    def worker_left(self, worker: str) -> None:
        """Remove a worker whose process has ended."""
        self.worker_detached(worker)
        for block_id in self._interrupted.pop(worker, ()):
            block = self._blocks.get(block_id)
            if block is not None and block.is_new:
                block.losses += 1
                self._changes.models.add(block.model)
        self._advance_deployments(self._models)

    def worker_forgotten(self, worker: str) -> None:
        """Forget a worker that was offline for too long, or that an operator removed."""
        self._interrupted.pop(worker, None)

    def end_adoption(self) -> None:
        """Stop accepting blocks that the previous leader assigned, because all its workers have attached or ended."""
        self._placed = {
            block.block_id: tuple(block.workers) for block in self.list_assigned_blocks() if not block.is_everywhere
        }
        self.is_adopting = False
        adopted, self._adopted = self._adopted, set()
        self._changes.models |= adopted
        self._advance_deployments(adopted)

    # --- progress

    def has_unloaded_unwanted(self, model: str) -> bool:
        """Return whether every worker has unloaded the model's unwanted blocks."""
        return not any(block.workers for block in self.list_model_blocks(model) if not block.is_wanted)

    def has_load_ended(self, model: str) -> bool:
        """Return whether every worker has loaded the model's chosen blocks, or has failed to load them."""
        blocks = [block for block in self.list_model_blocks(model) if block.role is Role.CHOSEN]
        return bool(self._workers) and all(map(self._has_load_ended_everywhere, blocks))

    def describe_failure(self, model: str) -> str:
        """Return why a version of the newest deployment failed to load; empty if no version failed."""
        for block in self.list_model_blocks(model):
            if block.role is Role.CHOSEN and (reason := block.describe_failure()):
                others = (each for each in self.list_model_blocks(model) if each is not block or each.keeps_older_load)
                serving = [each.version for each in others if each.compute_state()[0] in SERVABLE]
                still_serving = f"; still serving: version {', '.join(serving)}" if serving else ""
                return f"version {block.version} failed to load: {reason}{still_serving}"
        return ""

    # --- internals

    def _set_workers(self, workers: Iterable[str]) -> None:
        self._workers = frozenset(workers)
        self._open = self._workers - self._closed

    def _apply_report(self, worker: str, reported: Mapping[str, WorkerState | None]) -> set[str]:
        """Apply a worker's report of its blocks; return the models that changed."""
        changed, held = set(), self._held[worker]
        for block_id, state in reported.items():
            block = self._blocks.get(block_id)
            if block is None or not block.report(worker, state):
                continue
            (held.discard if state is None else held.add)(block_id)
            changed.add(block.model)
            is_assignment = self._may_change_targets(block, worker)
            (self._changes.models if is_assignment else self._changes.states).add(block.model)
        return changed

    def _adopt_report(self, reported: Mapping[str, WorkerState | None]) -> None:
        """Continue the previous leader's unfinished deployments, which the blocks on this worker reveal."""
        models = set()
        for block_id, found in reported.items():
            block = self._blocks.get(block_id)
            if block is None or found is None or block.is_deleted:
                continue
            has_chosen = any(other.role is Role.CHOSEN for other in self.list_model_blocks(block.model))
            if has_chosen and not block.is_wanted:
                block.role, block.is_shown = Role.STAND_IN, True
                block.is_in_service = found.may_serve
                models.add(block.model)
            elif block.role is Role.CHOSEN and found.is_new and not block.is_in_service:
                block.is_new = True
                models.add(block.model)
        self._adopted |= models
        self._changes.models |= models
        for model in models:
            self._set_replacements(model)

    def _set_replacements(self, model: str) -> None:
        blocks = [block for block in self.list_model_blocks(model) if block.is_wanted]
        standing_in = tuple(block.block_id for block in blocks if block.role is Role.STAND_IN)
        has_others = bool(standing_in) or any(block.is_in_service for block in blocks)
        for block in blocks:
            block.is_new = block.role is Role.CHOSEN and not block.is_in_service and has_others
            block.replaces = standing_in if block.is_new else ()

    def _advance_deployments(self, models: Iterable[str]) -> None:
        for model in list(models):
            if all(block.is_settled for block in self.list_model_blocks(model)):
                continue
            if model not in self._adopted:
                self._put_in_service(model)
            self._load_older_version(model)
            self._forget_deleted(model)

    def _put_in_service(self, model: str) -> None:
        """Put loaded new blocks into service; when all have loaded, withdraw the versions that they replace."""
        blocks = self.list_model_blocks(model)
        if not any(block.is_new or block.role is Role.STAND_IN for block in blocks):
            return
        chosen = [block for block in blocks if block.role is Role.CHOSEN]
        has_all = all(map(self._is_loaded, chosen))
        for block in blocks:
            if block.role is Role.STAND_IN and has_all:
                block.withdraw()
                self._changes.models.add(model)
            elif block.is_new and (has_all or not block.replaces) and self._is_loaded(block):
                block.is_new, block.replaces, block.is_in_service = False, (), True
                self._changes.models.add(model)

    def _load_older_version(self, model: str) -> None:
        """Load the next older version if every wanted version of the model failed."""
        blocks = self.list_model_blocks(model)
        spares = [block for block in blocks if not block.is_wanted and block.record.role is BlockRole.SPARE]
        spares = [block for block in spares if block.folder and not block.is_deleted]
        wanted = [block for block in blocks if block.is_wanted]
        if not spares or not wanted or not all(map(self._has_failed, wanted)):
            return
        spare = max(spares, key=lambda block: int(block.version))
        spare.role, spare.is_shown, spare.losses = Role.STAND_IN, True, 0
        self._changes.models.add(model)
        self._set_replacements(model)

    def _forget_deleted(self, model: str) -> None:
        for block in [block for block in self.list_model_blocks(model) if block.is_deleted and not block.workers]:
            del self._blocks[block.block_id]
            self._models[model].remove(block)
            self._changes.models.add(model)

    def _may_be_misplaced(self, block: DeployedBlock, targets: frozenset[str]) -> bool:
        """Return whether the block may be on a worker that should not hold the block."""
        return bool(self._closed) if block.is_everywhere else not block.workers.keys() <= targets

    def _may_change_targets(self, block: DeployedBlock, worker: str) -> bool:
        """Return whether the worker's report may change which workers should hold the block."""
        targets = self.find_target_workers(block)
        is_adopted = self.is_adopting and not block.is_everywhere
        return is_adopted or worker not in targets or self._may_be_misplaced(block, targets)

    def _has_failed(self, block: DeployedBlock) -> bool:
        return block.is_given_up or (
            block.compute_state()[0] is BlockState.FAILED and self._has_load_ended_everywhere(block)
        )

    def _is_loaded(self, block: DeployedBlock) -> bool:
        return (
            not block.is_given_up
            and self._has_load_ended_everywhere(block)
            and all(block.workers[worker].state in SERVABLE for worker in self.find_target_workers(block))
        )

    def _has_load_ended_everywhere(self, block: DeployedBlock) -> bool:
        if block.is_given_up:
            return True
        targets = self.find_target_workers(block)
        return bool(targets) and all(map(block.has_load_ended, targets))
