"""A block whose requests are joined into batches: what an instance runs, and when it gets it."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import numpy as np
import structlog

from penstock.core.errors import DeviceOutOfMemory, PenstockError, without_trace
from penstock.core.tensors import Array
from penstock.engines.base import Engine
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Piece, Task
from penstock.worker.offload.pool import TaskPool
from penstock.worker.running.alarm import Alarm
from penstock.worker.running.batcher import LEAST_PART, Batch, Batcher
from penstock.worker.running.budget import delaying_levels
from penstock.worker.running.instances import BatchOutcome, as_engine_failure
from penstock.worker.running.runner import QueueRunner, WorkerTools

log = structlog.get_logger()
# A batch whose like took less than this of its thread runs on the loop: handing it to another and back would cost more.
INLINE_NS = 200_000
INLINE_BYTES = 64 * 1024
INLINE_AFTER = 16  # batches seen
# So may a few texts on a GPU, where the loop has nothing else to do: who waits for them stays awake, and its thread's
# time has the waiting in it, so that a GPU that others keep busy is left to threads.
LONE_NS = 1_000_000
LONE_TOKENS = 512
# How much of what a batch took is expected of the next: more of one that took longer, so that a model with slow ones
# among its batches is slow; but not all, as a thread takes longer, too, that its processor's caches know nothing of.
SLOWER, QUICKER = 0.25, 0.1
# A model that lets other threads work takes little of its own, and the loop would stand: so many in a row that waited
# on the loop for longer than above, where a busy machine makes one wait now and then, and it is left for a while.
WAITED = 3
LEFT_FOR = 1000  # batches

# While this many full batches wait for each instance, one is handed out ahead: an instance goes on with it at once,
# whatever the loop does. Earlier it would only fix what is not yet known to be the best choice.
AHEAD_FROM = 1.0
AHEAD_FROM_ON_A_GPU = 1 / LEAST_PART  # which would idle for longer than a better choice saves


class BatchRunner(QueueRunner):
    def __init__(self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None = None) -> None:
        settings, instances = loaded.description.settings, loaded.description.instances
        execution = BatchExecution(loaded.task, loaded.engine, loaded.settings.warm_up)
        batcher = Batcher(settings.batching, delaying_levels(settings.priorities), 1 / (2 * instances))
        super().__init__(loaded, tools, tasks, execution, batcher)
        self._has_steady_cost = loaded.has_steady_cost
        self._has_quick_rows = loaded.signature.token_rows.is_marked
        self._inline_ns = LONE_NS if self._has_quick_rows else INLINE_NS
        ahead_from = AHEAD_FROM if loaded.description.device == "cpu" else AHEAD_FROM_ON_A_GPU
        self._plenty_tokens = ahead_from * instances * (settings.batching.max_tokens or 0)
        self._expected_ns = 0.0  # what the next batch takes of its thread
        self._waited = 0  # batches in a row, on the loop
        self._inline_from = INLINE_AFTER  # the batch that may run there again
        self._may_wait = settings.batching.max_delay_ms > 0
        self._company = Alarm(self._pump)  # when what waits for others to join it has waited long enough

    def close(self) -> asyncio.Event:
        self._company.cancel()
        return super().close()

    def _pump(self) -> None:
        super()._pump()
        if self._may_wait:
            self._company.cancel()
            if self.idle:
                self._company.set(self._batcher.wake_at())

    def _may_hand_out(self) -> bool:
        instances = self.description.instances
        if self._running < instances:
            return True
        return self._running == instances and 0 < self._plenty_tokens <= self._batcher.tokens

    def _hand_out(self, batch: Batch) -> None:
        if self._is_quick(batch):
            outcome = self._execution.run(self.description.instances, batch)
            self._note_wait(outcome)
            self._settle(outcome)
        else:
            super()._hand_out(batch)

    def _is_quick(self, batch: Batch) -> bool:
        if self._running >= self.description.instances:
            return False
        if self._expected_ns > self._inline_ns:
            return False
        if self.statistics.execution_count < self._inline_from:
            return False
        if self._has_quick_rows:
            return len(self._jobs) == 1 and batch.padded_tokens <= LONE_TOKENS
        if not self._has_steady_cost:
            return False
        size_bytes: int = sum(
            array.nbytes
            for entry in batch.entries
            for array in entry.owner.prepared.pieces[entry.index].arrays.values()
        )
        return size_bytes <= INLINE_BYTES

    def _note_wait(self, outcome: BatchOutcome) -> None:
        self._waited = self._waited + 1 if outcome.took_ns - outcome.cpu_ns > self._inline_ns else 0
        if self._waited == WAITED:
            self._waited = 0
            self._inline_from = self.statistics.execution_count + LEFT_FOR

    def _settle(self, outcome: BatchOutcome) -> None:
        more_ns = outcome.cpu_ns - self._expected_ns
        self._expected_ns += more_ns * (SLOWER if more_ns > 0 else QUICKER)
        super()._settle(outcome)


class BatchExecution:
    """Join, infer, split. Runs in an instance's thread, or on the loop where it is quick."""

    def __init__(self, task: Task, engine: Engine, is_warmed_up: bool) -> None:
        self._task = task
        self._engine = engine
        self._is_warmed_up = is_warmed_up

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        outcome = BatchOutcome(instance, batch, [], time.monotonic())
        begun_ns = time.thread_time_ns()
        pieces = [entry.owner.prepared.pieces[entry.index] for entry in batch.entries]
        outcome.results = self._run_batch(outcome, pieces)
        outcome.cpu_ns = time.thread_time_ns() - begun_ns
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
            failure = as_engine_failure(error)
        # From here on nothing holds what the failed run had in memory.
        if isinstance(failure, DeviceOutOfMemory):
            return self._run_halves(outcome, pieces, failure)
        if len(pieces) == 1:
            return [failure]
        # One of them is at fault: alone, each gets its own answer.
        return [self._run_batch(outcome, [piece])[0] for piece in pieces]

    def _run_halves(
        self, outcome: BatchOutcome, pieces: list[Piece], failure: DeviceOutOfMemory
    ) -> list[Sequence[Array] | PenstockError]:
        """What is too much together: pieces by themselves, and the rows of one."""
        log.warning(
            "batch_halved", pieces=len(pieces), rows=sum(piece.rows for piece in pieces), reason=failure.message
        )
        if len(pieces) > 1:
            half = len(pieces) // 2
            return [*self._run_batch(outcome, pieces[:half]), *self._run_batch(outcome, pieces[half:])]
        try:
            outputs = self._infer_halves(outcome.instance, self._task.join(pieces), pieces[0].rows, failure)
            return list(self._task.split(pieces, outputs))
        except Exception as error:  # noqa: BLE001 - as above
            return [as_engine_failure(error)]

    def _infer_halves(
        self, instance: int, inputs: Mapping[str, Array], rows: int, failure: DeviceOutOfMemory
    ) -> list[Array]:
        """Raises the failure where one row is too much, and where rows are not the first dimension of everything."""
        if rows < 2 or any(array.shape[:1] != (rows,) for array in inputs.values()):
            raise failure
        found: list[list[Array]] = []
        for first, end in ((0, rows // 2), (rows // 2, rows)):
            half = {name: array[first:end] for name, array in inputs.items()}
            found.append(self._infer_half(instance, half, end - first))
            if any(output.shape[:1] != (end - first,) for output in found[-1]):
                raise failure
        return [np.concatenate(both) for both in zip(*found, strict=True)]

    def _infer_half(self, instance: int, inputs: Mapping[str, Array], rows: int) -> list[Array]:
        try:
            return self._engine.infer(instance, inputs, self._task.engine_outputs)
        except DeviceOutOfMemory as error:
            failure = error
            without_trace(error)
        return self._infer_halves(instance, inputs, rows, failure)
