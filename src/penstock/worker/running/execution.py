"""One batch on one instance: join, infer, split. Runs in an instance's thread, or on the loop where it is quick."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import EngineFailed, PenstockError
from penstock.core.tensors import Array
from penstock.engines.base import Engine
from penstock.tasks.base import Piece, Task
from penstock.worker.running.batcher import Batch


@dataclass(slots=True)
class BatchOutcome:
    """What became of a batch, and where its time went."""

    instance: int
    batch: Batch
    results: list[Sequence[Array] | PenstockError]
    started: float = 0.0  # of the monotonic clock
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    ended: str = ""  # the session that it ended; empty: none


class Execution:
    def __init__(self, task: Task, engine: Engine, is_warmed_up: bool) -> None:
        self._task = task
        self._engine = engine
        self._is_warmed_up = is_warmed_up

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        outcome = BatchOutcome(instance, batch, [], time.monotonic())
        pieces = [entry.owner.prepared.pieces[entry.index] for entry in batch.entries]
        outcome.results = self._run_batch(outcome, pieces)
        return outcome

    def probe(self, instance: int) -> str:
        """Whether the model still works. Empty, or what is wrong.

        A model that is not warmed up may not take the inputs for it: that its instance answers must do.
        """
        if self._is_warmed_up:
            self._engine.infer(instance, self._task.warm_up_inputs()[0], self._task.engine_outputs)
        return ""

    def _run_batch(self, outcome: BatchOutcome, pieces: list[Piece]) -> list[Sequence[Array] | PenstockError]:
        try:
            start = time.perf_counter_ns()
            inputs = self._task.join(pieces)
            joined = time.perf_counter_ns()
            outputs = self._engine.infer(outcome.instance, inputs, self._task.engine_outputs)
            computed = time.perf_counter_ns()
            results: list[Sequence[Array] | PenstockError] = list(self._task.split(pieces, outputs))
            outcome.input_ns += joined - start
            outcome.infer_ns += computed - joined
            outcome.output_ns += time.perf_counter_ns() - computed
            return results
        except Exception as error:  # noqa: BLE001 - whatever a model does, its neighbours live on
            if len(pieces) == 1:
                return [as_engine_failure(error)]
            # One of them is at fault: alone, each gets its own answer.
            return [self._run_batch(outcome, [piece])[0] for piece in pieces]


def as_engine_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return EngineFailed(f"the model failed on this input: {type(error).__name__}: {error}")
