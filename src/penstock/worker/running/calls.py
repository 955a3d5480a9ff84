"""A block with a model's own code: one request at a time, with its session, answered as often as the model likes."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

import structlog

from penstock.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, PenstockError, WorkerLost
from penstock.core.tensors import Array, Tensor
from penstock.engines.base import CallContext, ContextEngine
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Piece, Task
from penstock.worker.job import AnswerCredits, WorkerJob
from penstock.worker.offload.pool import TaskPool
from penstock.worker.running.alarm import Alarm
from penstock.worker.running.batcher import Batch, Batcher
from penstock.worker.running.budget import ALONE, delaying_levels
from penstock.worker.running.instances import BatchOutcome, as_engine_failure
from penstock.worker.running.runner import QueueRunner, WorkerTools
from penstock.worker.running.sessions import ModelSessions

log = structlog.get_logger()
now = time.monotonic
ENDED, ANEW, IDLE, LEAVES = "ended", "started anew", "idle", "worker leaves"  # why a session is over
IDLE_EVERY_S = 0.001  # sessions that become idle within this time are ended together


class CallRunner(QueueRunner):
    """Keeps the sessions and the answers of its jobs. What the model must hear is said in its instances' threads."""

    close_s = 2.0  # a process of its own may be ended at any time; native code must not lose its session while it runs

    def __init__(
        self, loaded: LoadedBlock, engine: ContextEngine, tools: WorkerTools, tasks: TaskPool | None = None
    ) -> None:
        settings = loaded.description.settings
        self._is_decoupled = settings.is_decoupled
        self._is_stateful = settings.sessions.is_stateful
        self._calls = CallExecution(loaded.task, engine, self._is_decoupled, self._answer_soon)
        super().__init__(loaded, tools, tasks, self._calls, Batcher(ALONE, delaying_levels(settings.priorities)))
        self._sessions = ModelSessions(settings.sessions.idle_s)
        self._idle = Alarm(self._end_idle, IDLE_EVERY_S)

    def accept(self, job: WorkerJob) -> None:
        self._enter(job)
        if (step := job.session) is not None:
            is_lost = self._is_stateful and not step.is_start and step.session_id not in self._sessions
            self._sessions.enter(step.session_id)
            if is_lost:
                self._end(job, WorkerLost("the model that had the session's state is gone; nothing was run"))
                return
        if self._is_decoupled:
            if job.response_credits == 0:
                why = "this model gives any number of answers to one request: ask it through a stream "
                self._end(job, InvalidRequest(why + "(ModelStreamInfer, or a WebSocket)"))
                return
            expiry = self._loop.call_later(max(0.0, job.deadline - now()), self._expire_late, job)
            job.answers = AnswerCredits(job.response_credits, expiry)
        self._preparation.prepare(job)

    def allow(self, job: WorkerJob, credits: int) -> None:
        if job.answers is not None:
            job.answers.allow(credits)

    async def drain(self) -> None:
        """Returns when nothing is left to run, and the model knows that its sessions are over."""
        await super().drain()
        if over := self._sessions.clear():
            told = asyncio.Event()
            self._tell(over, LEAVES, lambda problem: told.set())
            await told.wait()

    def close(self) -> asyncio.Event:
        self._idle.cancel()
        if over := self._sessions.clear():
            self._tell(over, LEAVES, lambda problem: None)
        return super().close()

    def _hand_out(self, batch: Batch) -> None:
        for entry in batch.entries:
            job: WorkerJob = entry.owner
            if job.context is None:
                self._give_context(job)
        super()._hand_out(batch)

    def _give_context(self, job: WorkerJob) -> None:
        step, parameters = job.session, job.request.parameters
        if step is None:
            job.context = CallContext(job.request_id, parameters)
            return
        is_new, job.is_anew = self._sessions.start(step)
        job.context = CallContext(job.request_id, parameters, step.session_id, step.seq_no or 0, is_new, step.is_end)

    def _ran(self, outcome: BatchOutcome) -> None:
        if outcome.ended:
            self._sessions.end(outcome.ended)
        super()._ran(outcome)

    def _answer_soon(self, job: WorkerJob, tensors: list[Tensor]) -> None:
        """Called in an instance's thread with one answer of several."""
        self._loop.call_soon_threadsafe(self._answer, job, tensors)

    def _answer(self, job: WorkerJob, tensors: list[Tensor]) -> None:
        if not job.is_gone:
            job.reply(job, tensors, True)

    def _complete(self, job: WorkerJob) -> None:
        if job.answers is None:
            super()._complete(job)
        else:
            self._end(job, [])  # its answers have gone already; this only ends them

    def _expire_late(self, job: WorkerJob) -> None:
        """A decoupled model's deadline counts while it answers, too."""
        self._end(job, DeadlineExceeded("the deadline passed before the model had given all its answers"))

    def _forget(self, job: WorkerJob) -> None:
        super()._forget(job)
        if job.answers is not None:
            job.answers.close()
        if job.session is not None:
            self._sessions.leave(job.session.session_id, now())
            self._idle.set(self._sessions.next_due())

    def _end_idle(self) -> None:
        if over := self._sessions.expire(now()):
            self._tell(over, IDLE, lambda problem: None)
        self._idle.set(self._sessions.next_due())

    def _tell(self, session_ids: list[str], reason: str, done: Callable[[str], None]) -> None:
        def tell(instance: int) -> str:
            self._calls.end_sessions(session_ids, reason)
            return ""

        self._instances.ask(tell, done)


class CallExecution:
    """Calls the model with one request at a time, in the instances' threads."""

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
        with closing(made):
            while (outputs := _next(made, outcome)) is not None:
                start = time.perf_counter_ns()
                tensors = self._task.finish(job.request, prepared, self._task.split([piece], outputs))
                outcome.output_ns += time.perf_counter_ns() - start
                if not answers.take():
                    raise Cancelled("nobody waits for this model's answers any more")
                self._send(job, tensors)
        return ()


def _next(made: Iterator[list[Array]], outcome: BatchOutcome) -> list[Array] | None:
    start = time.perf_counter_ns()
    try:
        return next(made, None)
    finally:
        outcome.infer_ns += time.perf_counter_ns() - start
