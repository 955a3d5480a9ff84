"""The runner of a block whose requests are joined into batches: decides when a batch runs, and in which thread."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import numpy as np
import structlog

from penstock.core.errors import DeviceOutOfMemory, PenstockError, remove_trace
from penstock.core.tensors import Array
from penstock.engines.engine_protocols import Engine
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Piece, Task
from penstock.worker.offload.task_pool import TaskPool
from penstock.worker.running.batcher import LEAST_PART, Batch, Batcher
from penstock.worker.running.block_runner import QueueRunner, WorkerTools
from penstock.worker.running.budget import delaying_levels
from penstock.worker.running.earliest_timer import EarliestTimer
from penstock.worker.running.instances import BatchOutcome, as_engine_failure

log = structlog.get_logger()
# Batches that use less CPU time than this run on the event loop: passing them to a thread and back would cost more.
INLINE_NS = 200_000
INLINE_BYTES = 64 * 1024
INLINE_AFTER = 16  # number of batches before the first one may run on the loop
# A few texts on a GPU may also run on the loop, if the loop has nothing else to do. The calling thread spins while it
# waits for the GPU, so its CPU time includes the wait. If other processes keep the GPU busy, the wait is too long for
# the loop, and threads run the batches.
LONE_NS = 1_000_000
LONE_TOKENS = 512
# Weight of a batch's CPU time in the expected time. A slower batch weighs more, so that a model with some slow batches
# counts as slow. Its weight is not 1, because a thread also takes longer when its processor's caches are cold.
SLOWER, QUICKER = 0.25, 0.1
# A model that waits for other threads uses little CPU time, but would block the loop. After this many batches in a row
# that waited longer than allowed, threads run the next batches. One long wait has no effect: a busy machine causes it.
MAX_LONG_WAITS = 3
THREADS_FOR = 1000  # number of batches that threads then run

# If this many full batches wait per instance, one batch is handed out ahead, so that an instance continues at once even
# if the loop is busy. Below this number, the choice is made later, when more pieces to choose from have arrived.
AHEAD_FROM = 1.0
AHEAD_FROM_ON_A_GPU = 1 / LEAST_PART  # lower, because an idle GPU costs more than a better choice saves


class BatchRunner(QueueRunner):
    """Runs batches in the threads of a block's instances, and quick batches on the event loop."""

    def __init__(self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None = None) -> None:
        settings, instances = loaded.description.settings, loaded.description.instances
        execution = BatchExecution(*loaded.batching, loaded.settings.warm_up)
        batcher = Batcher(settings.batching, delaying_levels(settings.priorities), 1 / (2 * instances))
        super().__init__(loaded, tools, tasks, execution, batcher)
        self._has_steady_cost = loaded.has_steady_cost
        self._has_quick_rows = loaded.signature.token_rows.is_marked
        self._inline_ns = LONE_NS if self._has_quick_rows else INLINE_NS
        ahead_from = AHEAD_FROM if loaded.description.device == "cpu" else AHEAD_FROM_ON_A_GPU
        self._ahead_from_tokens = ahead_from * instances * (settings.batching.max_tokens or 0)
        self._expected_ns = 0.0  # estimated CPU time of the next batch
        self._long_waits = 0  # number of batches in a row that waited too long on the loop
        self._inline_from = INLINE_AFTER  # number of the first batch that may run on the loop again
        self._may_wait = settings.batching.max_delay_ms > 0
        self._delay_timer = EarliestTimer(self._pump)  # ends the wait of pieces for more pieces

    def close(self) -> asyncio.Event:
        self._delay_timer.cancel()
        return super().close()

    def _pump(self) -> None:
        super()._pump()
        if self._may_wait:
            self._delay_timer.cancel()
            if self.idle:
                self._delay_timer.set(self._batcher.wake_at())

    def _may_hand_out(self) -> bool:
        instances = self.description.instances
        if self._running < instances:
            return True
        return self._running == instances and 0 < self._ahead_from_tokens <= self._batcher.tokens

    def _hand_out(self, batch: Batch) -> None:
        if self._may_run_on_loop(batch):
            outcome = self._execution.run(self.description.instances, batch)
            self._record_wait(outcome)
            self._count_and_answer(outcome)
        else:
            super()._hand_out(batch)

    def _may_run_on_loop(self, batch: Batch) -> bool:
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

    def _record_wait(self, outcome: BatchOutcome) -> None:
        self._long_waits = self._long_waits + 1 if outcome.took_ns - outcome.cpu_ns > self._inline_ns else 0
        if self._long_waits == MAX_LONG_WAITS:
            self._long_waits = 0
            self._inline_from = self.statistics.execution_count + THREADS_FOR

    def _count_and_answer(self, outcome: BatchOutcome) -> None:
        more_ns = outcome.cpu_ns - self._expected_ns
        self._expected_ns += more_ns * (SLOWER if more_ns > 0 else QUICKER)
        super()._count_and_answer(outcome)


class BatchExecution:
    """Runs a batch in an instance's thread or on the event loop: joins pieces, runs the engine, splits the outputs."""

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
        """Return why the model does not work, or an empty text if it works.

        A model without warm-up may reject the warm-up inputs, so such a model works if the instance's thread answers.
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
        except Exception as error:  # noqa: BLE001 - a failing model must not affect other batches
            failure = as_engine_failure(error)
        # Outside the `except` block, nothing refers to the memory of the failed run.
        if isinstance(failure, DeviceOutOfMemory):
            return self._run_halves(outcome, pieces, failure)
        if len(pieces) == 1:
            return [failure]
        # Run each piece alone, because one of them may have caused the failure.
        return [self._run_batch(outcome, [piece])[0] for piece in pieces]

    def _run_halves(
        self, outcome: BatchOutcome, pieces: list[Piece], failure: DeviceOutOfMemory
    ) -> list[Sequence[Array] | PenstockError]:
        """Run a batch that needs too much memory in two halves: of its pieces, or of the rows of its only piece."""
        log.warning(
            "batch_halved", pieces=len(pieces), rows=sum(piece.rows for piece in pieces), reason=failure.message
        )
        if len(pieces) > 1:
            half = len(pieces) // 2
            return [*self._run_batch(outcome, pieces[:half]), *self._run_batch(outcome, pieces[half:])]
        try:
            outputs = self._infer_halves(outcome.instance, self._task.join(pieces), pieces[0].rows, failure)
            return list(self._task.split(pieces, outputs))
        except Exception as error:  # noqa: BLE001 - see above
            return [as_engine_failure(error)]

    def _infer_halves(
        self, instance: int, inputs: Mapping[str, Array], rows: int, failure: DeviceOutOfMemory
    ) -> list[Array]:
        """Run the rows in two halves.

        Raise `failure` if there is only one row, or if the first dimension of a tensor is not `rows`.
        """
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
            remove_trace(error)
        return self._infer_halves(instance, inputs, rows, failure)
