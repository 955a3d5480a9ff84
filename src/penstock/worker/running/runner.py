"""One block on a worker: its task, its engine, its batcher and its instances.

All state is owned by the event loop. Threads only compute: they get a batch or a request
and hand the outcome back to the loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from math import inf

from penstock.core.errors import DeadlineExceeded, Draining, InvalidRequest, PenstockError, QueueTimeout
from penstock.core.tensors import Tensor
from penstock.engines.base import ContextEngine
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Prepared
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.job import WorkerJob
from penstock.worker.offload.pool import TaskPool
from penstock.worker.offload.preparation import PoolPreparation
from penstock.worker.running.alarm import Alarm
from penstock.worker.running.batcher import Batch, Batcher, QueuedPiece
from penstock.worker.running.budget import ALONE, budget_of, delaying_levels
from penstock.worker.running.calls import CallExecution
from penstock.worker.running.contexts import Contexts
from penstock.worker.running.counts import BlockCounts
from penstock.worker.running.execution import BatchOutcome, Execution
from penstock.worker.running.instances import InstanceThreads
from penstock.worker.running.preparation import Preparation

now = time.monotonic

# A batch whose like took less than this runs on the loop: handing it to a thread and back would cost more.
INLINE_NS = 100_000
INLINE_BYTES = 64 * 1024
INLINE_AFTER = 16  # batches seen
SLOW_DECAY = 0.95  # how soon one slow batch is forgotten

# While this many full batches wait for each instance, one is handed out ahead: an instance goes on with it at once,
# whatever the loop does. Earlier it would only fix what is not yet known to be the best choice.
AHEAD_FROM = 1

# Deadlines that pass within this time are seen to together: each look goes over all that waits.
EXPIRY_S = 0.001

MAX_PROBES = 64  # that wait for one answer; the oldest beyond are not told

CLOSE_S = 5.0  # what a model with its own code has to end what it does, and its sessions


class BlockRunner:
    def __init__(
        self,
        loaded: LoadedBlock,
        pool: Executor,
        metrics: WorkerMetrics,
        traces: Traces,
        tasks: TaskPool | None = None,
    ) -> None:
        """`tasks` prepare and finish in place of the pool's threads; they are this runner's to close."""
        self.description = description = loaded.description
        settings, task, engine = description.settings, loaded.task, loaded.engine
        self._engine = engine
        self._traces = traces
        self._counts = BlockCounts(metrics, description)
        self.statistics = self._counts.statistics
        self._loop = asyncio.get_running_loop()
        self._tasks = tasks
        self._preparation = (
            Preparation(task, pool, self._prepared, self._finished)
            if tasks is None
            else PoolPreparation(task, pool, tasks, self._prepared, self._finished)
        )
        calls: CallExecution | None = None
        if isinstance(engine, ContextEngine):
            calls = CallExecution(task, engine, settings.is_decoupled, self._answer_soon)
        self._execution: Execution | CallExecution = (
            Execution(task, engine, loaded.settings.warm_up) if calls is None else calls
        )
        self._instances = InstanceThreads(description.model, description.instances, self._execution.run, self._ran)
        self._contexts = None if calls is None else Contexts(settings, calls, self._instances, self._late)
        self._may_run_inline = loaded.has_steady_cost and calls is None
        self._batcher = Batcher(
            budget_of(settings, description.instances) if calls is None else ALONE,
            delaying_levels(settings.priorities),
        )
        self._jobs: dict[WorkerJob, None] = {}
        self._running = 0  # batches handed out
        max_tokens = settings.batching.max_tokens if calls is None else None
        self._plenty_tokens = AHEAD_FROM * description.instances * (max_tokens or 0)
        self._timer: asyncio.TimerHandle | None = None
        self._expiry = Alarm(self._expire_due, EXPIRY_S)
        self._probes: deque[Callable[[str], None]] = deque(maxlen=MAX_PROBES)
        self._is_pump_due = False
        self._slowest_ns = 0.0  # of late
        self._drained = asyncio.Event()
        self._drained.set()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._batcher)

    @property
    def idle(self) -> int:
        return max(0, self.description.instances - self._running)

    # --- jobs come and go

    def accept(self, job: WorkerJob) -> None:
        job.arrived = now()
        self._jobs[job] = None
        self._drained.clear()
        if self._contexts is not None:
            try:
                self._contexts.enter(job)
            except InvalidRequest as error:
                self._fail(job, error)
                return
        self._preparation.prepare(job)

    def cancel(self, job: WorkerJob) -> None:
        """Its answer is not wanted any more: out of the queue, or unheard when it comes."""
        if not job.is_gone:
            self._counts.cancelled()
            self._batcher.remove(job)
            self._forget(job)

    def allow(self, job: WorkerJob, credits: int) -> None:
        if job.answers is not None:
            job.answers.allow(credits)

    def hand_back(self) -> list[WorkerJob]:
        """Takes out and returns the jobs of which nothing has run."""
        jobs = [job for job in self._jobs if not job.has_started]
        for job in jobs:
            self._batcher.remove(job)
            self._forget(job)
        return jobs

    def probe(self, done: Callable[[str], None]) -> None:
        """Tells, in its turn, whether the model still works: an empty text, or the problem. A hung one never tells."""
        self._probes.append(done)
        if len(self._probes) == 1:
            self._instances.ask(self._execution.probe, self._probed)

    def _probed(self, problem: str) -> None:
        waiting, self._probes = self._probes, deque(maxlen=MAX_PROBES)
        for done in waiting:
            done(problem)

    def flush_metrics(self) -> None:
        self._counts.flush()

    async def drain(self) -> None:
        """Returns when nothing is left to run, and the model knows that its sessions are over."""
        await self._drained.wait()
        if self._contexts is not None:
            await self._contexts.end_all()

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """After `drain`, or to abandon what runs. The engine closes when its threads have left; then comes `then`."""
        self.flush_metrics()
        self._expiry.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks is not None:
            self._tasks.close()
        if self._contexts is not None:
            for job in [job for job in self._jobs if job.answers is not None]:
                self._fail(job, Draining("the model was unloaded before it had given all its answers; ask again"))
            self._contexts.close()
        # Native code must not lose its session while it runs; a process of its own may be ended at any time.
        patience_s = None if self._contexts is None else CLOSE_S
        self._instances.close(lambda: self._close_engine(then), patience_s)

    def _close_engine(self, then: Callable[[], None]) -> None:
        """In a thread of its own."""
        try:
            self._engine.close()
        finally:
            then()

    # --- from the queue to the instances

    def _prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self._fail(job, outcome)
            return
        job.prepared = outcome
        job.missing = len(outcome.pieces)
        job.results = [None] * job.missing
        if not outcome.pieces:
            self._preparation.finish(job)
            return
        self._batcher.append(
            (
                QueuedPiece(job, i, p.rows, p.length, p.key, job.deadline, job.priority, job.queue_deadline)
                for i, p in enumerate(outcome.pieces)
            ),
            now(),
        )
        if self._batcher.next_due() < self._expiry.at:
            self._expiry.set(self._batcher.next_due())
        self._pump_soon()

    def _pump_soon(self) -> None:
        """After all that has arrived together is in line."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Gives every idle instance what it should run now."""
        self._is_pump_due = False
        at = now()
        self.expire(at)
        while self._may_hand_out():
            batch = self._batcher.next_batch(at)
            if batch is None:
                break
            self._start(batch)
            if self._is_quick(batch):
                self._settle(self._execution.run(self.description.instances, batch))
            else:
                self._running += 1
                self._instances.run(batch)
        self._set_timer()

    def _may_hand_out(self) -> bool:
        instances = self.description.instances
        if self._running < instances:
            return True
        return self._running == instances and 0 < self._plenty_tokens <= self._batcher.tokens

    def _start(self, batch: Batch) -> None:
        for entry in batch.entries:
            job: WorkerJob = entry.owner
            if job.has_started:
                continue
            job.has_started = True
            if job.missing > 1 and job.queue_deadline < inf:
                self._batcher.excuse(job)
            if self._contexts is not None:
                self._contexts.start(job)

    def _is_quick(self, batch: Batch) -> bool:
        if self._running >= self.description.instances:
            return False
        if not self._may_run_inline or self._slowest_ns > INLINE_NS or self.statistics.execution_count < INLINE_AFTER:
            return False
        size_bytes: int = sum(
            array.nbytes
            for entry in batch.entries
            for array in entry.owner.prepared.pieces[entry.index].arrays.values()
        )
        return size_bytes <= INLINE_BYTES

    def _set_timer(self) -> None:
        wake_at = self._batcher.wake_at() if self.idle else None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            self._timer = self._loop.call_later(max(0.0, wake_at - now()), self._pump)

    # --- time

    def expire(self, at: float) -> None:
        """Fails what waits past its deadline, or longer than its queue policy allows."""
        if self._batcher.next_due() > at:
            return
        for entry in self._batcher.expire(at):
            error: PenstockError
            if entry.deadline <= at:
                error = DeadlineExceeded("the deadline passed while the request waited on the worker")
            else:
                level = entry.priority
                error = QueueTimeout(f"it waited longer than the queue policy of level {level} allows; try again later")
            self._fail(entry.owner, error)

    def _expire_due(self) -> None:
        self.expire(now())
        self._expiry.set(self._batcher.next_due())

    def _late(self, job: WorkerJob) -> None:
        """Of a decoupled model, whose deadline counts while it answers, too."""
        self._batcher.remove(job)
        self._fail(job, DeadlineExceeded("the deadline passed before the model had given all its answers"))

    # --- from the instances to the answers

    def _ran(self, outcome: BatchOutcome) -> None:
        self._running -= 1
        if outcome.ended and self._contexts is not None:
            self._contexts.ended(outcome.ended)
        self._pump()  # first, so that the instance does not idle while answers are written
        self._settle(outcome)

    def _settle(self, outcome: BatchOutcome) -> None:
        """Counts the batch and answers the jobs that it completes."""
        took_ns = outcome.input_ns + outcome.infer_ns + outcome.output_ns
        self._slowest_ns = max(took_ns, self._slowest_ns * SLOW_DECAY)
        self._counts.ran(outcome)
        rows = outcome.batch.rows
        for entry, result in zip(outcome.batch.entries, outcome.results, strict=True):
            job: WorkerJob = entry.owner
            if job.is_gone:
                continue
            timing = job.timing
            timing.queue_ns = max(timing.queue_ns, int((outcome.started - entry.arrived) * 1e9))
            timing.batch_ns += outcome.input_ns
            timing.compute_ns += outcome.infer_ns
            timing.batch_rows = max(timing.batch_rows, rows)
            if isinstance(result, PenstockError):
                self._batcher.remove(job)
                self._fail(job, result)
                continue
            job.results[entry.index] = result
            job.missing -= 1
            if job.missing == 0:
                if job.answers is None:
                    self._preparation.finish(job)
                else:
                    self._finished(job, [])  # its answers have gone already; this only ends them

    def _answer_soon(self, job: WorkerJob, tensors: list[Tensor]) -> None:
        """In an instance's thread: one answer of several."""
        self._loop.call_soon_threadsafe(self._answer, job, tensors)

    def _answer(self, job: WorkerJob, tensors: list[Tensor]) -> None:
        if not job.is_gone:
            job.reply(job, tensors, True)

    def _finished(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self._fail(job, outcome)
            return
        self._counts.succeeded(job, now())
        self._forget(job)
        if self._traces.is_on:
            self._trace(job)  # before the reply: a span ends within its parent
        job.reply(job, outcome)

    def _fail(self, job: WorkerJob, error: PenstockError) -> None:
        if job.is_gone:
            return
        self._counts.failed(job, error, now())
        self._forget(job)
        if self._traces.is_on:
            self._trace(job, error)
        job.reply(job, error)

    def _forget(self, job: WorkerJob) -> None:
        job.is_gone = True
        del self._jobs[job]
        if self._contexts is not None:
            self._contexts.leave(job)
        if not self._jobs:
            self._drained.set()

    def _trace(self, job: WorkerJob, error: PenstockError | None = None) -> None:
        start_ns = time.time_ns() - int((now() - job.arrived) * 1e9)
        timing = job.timing
        span = self._traces.start(
            "run",
            job.traceparent,
            start_ns,
            model=self.description.model,
            request_id=job.request_id,
            queue_ns=timing.queue_ns,
            compute_ns=timing.compute_ns,
            batch_rows=timing.batch_rows,
        )
        span.end(error)
