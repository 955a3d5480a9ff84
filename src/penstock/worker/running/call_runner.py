"""Runs a block whose model is custom code, which may use sessions and send several answers per request."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

import structlog

from penstock.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, PenstockError, WorkerLost
from penstock.core.tensors import Array, Tensor
from penstock.engines.engine_protocols import CallContext, ContextEngine
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Piece, Task
from penstock.worker.offload.task_pool import TaskPool
from penstock.worker.running.batcher import Batch, Batcher
from penstock.worker.running.block_runner import QueueRunner, WorkerTools
from penstock.worker.running.budget import ALONE, delaying_levels
from penstock.worker.running.earliest_timer import EarliestTimer
from penstock.worker.running.instances import BatchOutcome, as_engine_failure
from penstock.worker.running.model_sessions import ModelSessions
from penstock.worker.worker_job import AnswerCredits, WorkerJob

log = structlog.get_logger()
now = time.monotonic
ENDED, RESTARTED, IDLE, LEAVES = "ended", "restarted", "idle", "worker leaves"  # reasons for the end of a session
IDLE_EVERY_S = 0.001  # sessions that become idle within this time are ended together


class CallRunner(QueueRunner):
    """Runs one request at a time per instance, and tracks the sessions that the model knows."""

    close_s = 2.0  # then the model's process is killed, which is possible while its Python code runs

    def __init__(self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None = None) -> None:
        settings = loaded.description.settings
        self._is_decoupled = settings.is_decoupled
        self._is_stateful = settings.sessions.is_stateful
        task, _ = loaded.batching
        self._calls = CallExecution(task, loaded.context_engine, self._is_decoupled, self._schedule_answer)
        super().__init__(loaded, tools, tasks, self._calls, Batcher(ALONE, delaying_levels(settings.priorities)))
        self._sessions = ModelSessions(settings.sessions.idle_s)
        self._idle = EarliestTimer(self._end_idle_sessions, IDLE_EVERY_S)

    def accept(self, job: WorkerJob) -> None:
        self._enter(job)
        if (step := job.session) is not None:
            is_lost = self._is_stateful and not step.is_start and step.session_id not in self._sessions
            self._sessions.enter(step.session_id)
            if is_lost:
                self.end(
                    job,
                    WorkerLost(
                        "the model instance with the session's state is gone, and the request did not run: "
                        "start the session again"
                    ),
                )
                return
        if self._is_decoupled:
            if job.response_credits == 0:
                why = "this model gives any number of answers to one request: use a streaming request "
                self.end(job, InvalidRequest(why + "(ModelStreamInfer, or a WebSocket)"))
                return
            expiry = self._loop.call_later(max(0.0, job.deadline - now()), self._fail_at_deadline, job)
            job.answers = AnswerCredits(job.response_credits, expiry)
        self._preparation.prepare(job)

    def allow(self, job: WorkerJob, credits: int) -> None:
        if job.answers is not None:
            job.answers.allow(credits)

    async def drain(self) -> None:
        """Wait until no job is left and the model has been notified that its sessions are over."""
        await super().drain()
        if over := self._sessions.clear():
            notified = asyncio.Event()
            self._notify_session_ends(over, LEAVES, lambda problem: notified.set())
            await notified.wait()

    def close(self) -> asyncio.Event:
        self._idle.cancel()
        if over := self._sessions.clear():
            self._notify_session_ends(over, LEAVES, lambda problem: None)
        return super().close()

    def _hand_out(self, batch: Batch) -> None:
        for entry in batch.entries:
            job: WorkerJob = entry.owner
            if job.context is None:
                self._set_context(job)
        super()._hand_out(batch)

    def _set_context(self, job: WorkerJob) -> None:
        step, parameters = job.session, job.request.parameters
        if step is None:
            job.context = CallContext(job.request_id, parameters)
            return
        is_new, job.restarts_session = self._sessions.start(step)
        job.context = CallContext(job.request_id, parameters, step.session_id, step.seq_no or 0, is_new, step.is_end)

    def _on_batch_done(self, outcome: BatchOutcome) -> None:
        if outcome.ended:
            self._sessions.end(outcome.ended)
        super()._on_batch_done(outcome)

    def _schedule_answer(self, job: WorkerJob, tensors: list[Tensor]) -> None:
        """Pass one of several answers to the event loop. Called in an instance's thread."""
        self._loop.call_soon_threadsafe(self._send_answer, job, tensors)

    def _send_answer(self, job: WorkerJob, tensors: list[Tensor]) -> None:
        if not job.is_gone:
            job.reply(job, tensors, True)

    def _complete(self, job: WorkerJob) -> None:
        if job.answers is None:
            super()._complete(job)
        else:
            self.end(job, [])  # all answers were sent before; an empty outcome ends the job

    def _fail_at_deadline(self, job: WorkerJob) -> None:
        """Fail a job at its deadline, even if some of its answers were sent."""
        self.end(job, DeadlineExceeded("the deadline passed before the model had given all its answers"))

    def _forget(self, job: WorkerJob) -> None:
        super()._forget(job)
        if job.answers is not None:
            job.answers.close()
        if job.session is not None:
            self._sessions.leave(job.session.session_id, now())
            self._idle.set(self._sessions.next_due())

    def _end_idle_sessions(self) -> None:
        if over := self._sessions.expire(now()):
            self._notify_session_ends(over, IDLE, lambda problem: None)
        self._idle.set(self._sessions.next_due())

    def _notify_session_ends(self, session_ids: list[str], reason: str, done: Callable[[str], None]) -> None:
        def notify(instance: int) -> str:
            self._calls.end_sessions(session_ids, reason)
            return ""

        self._instances.run_errand(notify, done)


class CallExecution:
    """Calls the model with one request at a time, in an instance's thread."""

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
            outcome.results.append(self._call_model(outcome, entry.owner, entry.owner.prepared.pieces[entry.index]))
        return outcome

    def probe(self, instance: int) -> str:
        return self._engine.probe(instance)

    def end_sessions(self, session_ids: Iterable[str], reason: str) -> None:
        for session_id in session_ids:
            try:
                self._engine.end_session(session_id, reason)
            except Exception as error:  # noqa: BLE001 - the session is over even if the model raises
                log.warning("end_session_failed", session=session_id, reason=reason, error=repr(error))

    def _call_model(self, outcome: BatchOutcome, job: WorkerJob, piece: Piece) -> Sequence[Array] | PenstockError:
        context = job.context
        assert context is not None
        if job.restarts_session:
            self.end_sessions([context.session_id], RESTARTED)
        result: Sequence[Array] | PenstockError
        try:
            result = (
                self._stream_answers(outcome, job, piece) if self._is_decoupled else self._infer(outcome, job, piece)
            )
        except Exception as error:  # noqa: BLE001 - a failing model must not end its worker
            result = as_engine_failure(error)
        if context.session_id and context.is_end and not isinstance(result, Cancelled):
            # The session ends even if the model failed, because the gateway considers the step done. It ends before the
            # answer is sent, because the client may then restart the session.
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

    def _stream_answers(self, outcome: BatchOutcome, job: WorkerJob, piece: Piece) -> Sequence[Array]:
        """Send the model's answers, each when a credit is available.

        A credit is taken after the model has computed an answer, so that the end of the answers needs no credit.
        """
        context, answers, prepared = job.context, job.answers, job.prepared
        assert context is not None
        assert answers is not None
        assert prepared is not None
        inputs = self._task.join([piece])
        made = self._engine.stream(outcome.instance, inputs, self._task.engine_outputs, context)
        with closing(made):
            while (outputs := _compute_next_answer(made, outcome)) is not None:
                start = time.perf_counter_ns()
                tensors = self._task.finish(job.request, prepared, self._task.split([piece], outputs))
                outcome.output_ns += time.perf_counter_ns() - start
                if not answers.take():
                    raise Cancelled("the request was cancelled before the model's last answer")
                self._send(job, tensors)
        return ()


def _compute_next_answer(answers: Iterator[list[Array]], outcome: BatchOutcome) -> list[Array] | None:
    start = time.perf_counter_ns()
    try:
        return next(answers, None)
    finally:
        outcome.infer_ns += time.perf_counter_ns() - start
