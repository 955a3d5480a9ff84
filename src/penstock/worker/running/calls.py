"""One request to a model's own code: told of its session, answered once or as often as the model likes."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog

from penstock.core.errors import Cancelled, PenstockError
from penstock.core.tensors import Array, Tensor
from penstock.engines.base import ContextEngine
from penstock.tasks.base import Piece, Task
from penstock.worker.job import WorkerJob
from penstock.worker.running.batcher import Batch
from penstock.worker.running.execution import BatchOutcome, as_engine_failure

log = structlog.get_logger()
ENDED, ANEW, IDLE, LEAVES = "ended", "started anew", "idle", "worker leaves"  # why a session is over


class CallExecution:
    """Takes the place of Execution for a ContextEngine; all of it runs in the instances' threads."""

    def __init__(
        self, task: Task, engine: ContextEngine, is_decoupled: bool, send: Callable[[WorkerJob, list[Tensor]], None]
    ) -> None:
        self._task = task
        self._engine = engine
        self._is_decoupled = is_decoupled
        self._send = send

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        outcome = BatchOutcome(instance, batch, [], time.monotonic())
        for entry in batch.entries:
            outcome.results.append(self._call(outcome, entry.owner, entry.owner.prepared.pieces[entry.index]))
        return outcome

    def probe(self, instance: int) -> str:
        return self._engine.probe(instance)

    def end_sessions(self, session_ids: Iterable[str], reason: str) -> None:
        for session_id in session_ids:
            try:
                self._engine.end_session(session_id, reason)
            except Exception as error:  # noqa: BLE001 - it is over, whatever the model says to it
                log.warning("end_session_failed", session=session_id, reason=reason, error=repr(error))

    def _call(self, outcome: BatchOutcome, job: WorkerJob, piece: Piece) -> Sequence[Array] | PenstockError:
        context = job.context
        assert context is not None
        if job.is_anew:
            self.end_sessions([context.session_id], ANEW)
        result: Sequence[Array] | PenstockError
        try:
            result = self._stream(outcome, job, piece) if self._is_decoupled else self._infer(outcome, job, piece)
        except Exception as error:  # noqa: BLE001 - whatever a model does, its worker lives on
            result = as_engine_failure(error)
        if context.session_id and context.is_end and not isinstance(result, Cancelled):
            # Also where the model failed: its gateway takes the step for done. And before the answer is sent: who
            # has it may begin the session again.
            self.end_sessions([context.session_id], ENDED)
            outcome.ended = context.session_id
        return result

    def _infer(self, outcome: BatchOutcome, job: WorkerJob, piece: Piece) -> Sequence[Array]:
        assert job.context is not None
        start = time.perf_counter_ns()
        inputs = self._task.join([piece])
        joined = time.perf_counter_ns()
        outputs = self._engine.infer_with(outcome.instance, inputs, self._task.engine_outputs, job.context)
        computed = time.perf_counter_ns()
        result = self._task.split([piece], outputs)[0]
        outcome.input_ns += joined - start
        outcome.infer_ns += computed - joined
        outcome.output_ns += time.perf_counter_ns() - computed
        return result

    def _stream(self, outcome: BatchOutcome, job: WorkerJob, piece: Piece) -> Sequence[Array]:
        """Makes one answer ahead of what may be sent, so that the end needs no one's leave."""
        context, answers, prepared = job.context, job.answers, job.prepared
        assert context is not None
        assert answers is not None
        assert prepared is not None
        inputs = self._task.join([piece])
        made = self._engine.stream(outcome.instance, inputs, self._task.engine_outputs, context)
        try:
            while (outputs := _next(made, outcome)) is not None:
                start = time.perf_counter_ns()
                tensors = self._task.finish(job.request, prepared, self._task.split([piece], outputs))
                outcome.output_ns += time.perf_counter_ns() - start
                if not answers.take():
                    raise Cancelled("nobody waits for this model's answers any more")
                self._send(job, tensors)
        finally:
            close = getattr(made, "close", None)
            if close is not None:
                close()
        return ()


def _next(made: Iterator[list[Array]], outcome: BatchOutcome) -> list[Array] | None:
    start = time.perf_counter_ns()
    try:
        return next(made, None)
    finally:
        outcome.infer_ns += time.perf_counter_ns() - start
