"""The blocks of a cluster: which are wanted, and how far each worker is with them. Decides; never acts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.core.blocks import BlockState


@dataclass(slots=True)
class WorkerState:
    state: BlockState
    reason: str
    revision: int


@dataclass(slots=True)
class DeployedBlock:
    block_id: str
    model: str
    version: str
    folder: str
    revision: int
    is_wanted: bool = True
    workers: dict[str, WorkerState] = field(default_factory=dict)

    def state(self) -> tuple[BlockState, str]:
        if not self.is_wanted:
            return BlockState.UNLOADED, "unloaded"
        states = self.workers.values()
        if any(worker.state is BlockState.READY for worker in states):
            return BlockState.READY, ""
        if any(worker.state is BlockState.DORMANT for worker in states):
            return BlockState.DORMANT, ""
        failed = [worker for worker in states if worker.state is BlockState.FAILED]
        if failed and len(failed) == len(self.workers):
            return BlockState.FAILED, failed[0].reason
        return BlockState.LOADING, "loading"


class Registry:
    def __init__(self) -> None:
        self._blocks: dict[str, DeployedBlock] = {}
        self._workers: set[str] = set()
        self._revision = 0

    def blocks(self) -> list[DeployedBlock]:
        return list(self._blocks.values())

    def wanted(self) -> list[DeployedBlock]:
        return [block for block in self._blocks.values() if block.is_wanted]

    def of_model(self, model: str) -> list[DeployedBlock]:
        return [block for block in self._blocks.values() if block.model == model]

    def deploy(self, model: str, folder: str, versions: Iterable[tuple[str, str]]) -> int:
        """These (version, block id) of the model are wanted, loaded anew where they were; its others are not."""
        self._revision += 1
        chosen = dict(versions)
        for block in self.of_model(model):
            block.is_wanted = block.version in chosen
        for version, block_id in chosen.items():
            known = self._blocks.get(block_id)
            if known is None:
                self._blocks[block_id] = DeployedBlock(block_id, model, version, folder, self._revision)
            else:
                known.folder, known.revision, known.is_wanted = folder, self._revision, True
        return self._revision

    def withdraw(self, model: str) -> None:
        for block in self.of_model(model):
            block.is_wanted = False

    def worker_reported(self, worker: str, states: Iterable[tuple[str, BlockState, str, int]]) -> bool:
        """Returns whether anything changed."""
        is_changed = worker not in self._workers
        self._workers.add(worker)
        reported = {block_id: WorkerState(state, reason, revision) for block_id, state, reason, revision in states}
        for block in self._blocks.values():
            new = reported.get(block.block_id)
            if block.workers.get(worker) != new:
                is_changed = True
                if new is None:
                    del block.workers[worker]
                else:
                    block.workers[worker] = new
        return is_changed

    def worker_left(self, worker: str) -> None:
        self._workers.discard(worker)
        for block in self._blocks.values():
            block.workers.pop(worker, None)

    def is_settled(self, model: str) -> bool:
        """Every worker has answered the newest revision of the model's blocks, well or badly."""
        return bool(self._workers) and all(self._is_block_settled(block) for block in self.of_model(model))

    def failure(self, model: str) -> str:
        """Why the newest revision did not load on some worker; empty: it did."""
        for block in self.of_model(model):
            for state in block.workers.values():
                if block.is_wanted and state.state is BlockState.FAILED:
                    return state.reason
        return ""

    def _is_block_settled(self, block: DeployedBlock) -> bool:
        if not block.is_wanted:
            return not block.workers
        return self._workers == set(block.workers) and all(
            worker.revision >= block.revision and worker.state is not BlockState.LOADING
            for worker in block.workers.values()
        )
