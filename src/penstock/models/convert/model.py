"""A version of a model in this process: its engine and its task, without a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.config import Limits
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor
from penstock.models.building import TaskSpec, build_engine, build_task
from penstock.models.settings import ModelSettings
from penstock.tasks.base import Piece, TaskRequest

Batch = dict[str, Array]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What can be loaded: a file, the folder with what its task needs, and settings that fit both."""

    file: Path
    folder: Path
    settings: ModelSettings


class LoadedModel:
    """One instance. Use it as a context: the engine is closed at its end."""

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        self._engine = build_engine(model.file, model.settings, 1)
        try:
            self.signature: Signature = self._engine.load()
            self.task = build_task(TaskSpec(model.folder, model.settings, self.signature, Limits()))
        except BaseException:
            self._engine.close()
            raise

    def __enter__(self) -> "LoadedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def answer(self, request: TaskRequest) -> list[Tensor]:
        """Piece by piece, so that nothing is padded."""
        prepared = self.task.prepare(request)
        results = [self.task.split([piece], self.run(self.task.join([piece])))[0] for piece in prepared.pieces]
        return self.task.finish(request, prepared, results)

    def run(self, batch: Batch) -> list[Array]:
        return self._engine.infer(0, batch, self.task.engine_outputs)

    def graph_inputs(self, requests: Sequence[TaskRequest]) -> list[Batch]:
        """What the graph gets for each piece of the requests."""
        return [self.task.join([piece]) for request in requests for piece in self.task.prepare(request).pieces]

    def batches(self, requests: Sequence[TaskRequest]) -> list[Batch]:
        """The requests' pieces as a worker with all of them waiting would batch them: like lengths together."""
        pieces = [piece for request in requests for piece in self.task.prepare(request).pieces]
        if not all(piece.key == pieces[0].key for piece in pieces):
            return [self.task.join([piece]) for piece in pieces]
        budget = self._model.settings.batching
        batches: list[list[Piece]] = [[]]
        for piece in sorted(pieces, key=lambda piece: piece.length):
            rows = sum(other.rows for other in batches[-1]) + piece.rows
            is_full = rows > budget.max_rows or (budget.max_tokens and rows * piece.length > budget.max_tokens)
            if batches[-1] and is_full:
                batches.append([])
            batches[-1].append(piece)
        return [self.task.join(batch) for batch in batches]
