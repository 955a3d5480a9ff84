"""The base classes of all runners, which run a block's jobs from their arrival to their last answers.

The event loop owns all state. Threads only compute: they receive a batch or a request, and pass the outcome back to the
loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from penstock.core.errors import DeadlineExceeded, Draining, PenstockError, QueueTimeout
from penstock.core.tensors import Tensor
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Prepared
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.offload.task_pool import TaskPool
from penstock.worker.running.batcher import Batch, Batcher, QueuedPiece
from penstock.worker.running.cores import Cores
from penstock.worker.running.counts import BlockCounts
from penstock.worker.running.earliest_timer import EarliestTimer
from penstock.worker.running.instances import BatchOutcome, Execution, InstanceThreads
from penstock.worker.running.preparation import Preparation, PreparedMemory
from penstock.worker.worker_job import WorkerJob

now = time.monotonic

# Deadlines within this time of each other are handled together, because each check inspects all waiting pieces.
EXPIRY_S = 0.001

MAX_PROBES = 64  # probes that wait for the model's answer; above it, the oldest get no answer


@dataclass(frozen=True, slots=True)
class WorkerTools:
    """The objects that all blocks of a worker share."""

    prepared_memory: PreparedMemory  # the memory for prepared requests
    metrics: WorkerMetrics
    traces: Traces
    cores: Cores | None = None  # None if instances run on any core


class BlockRunner:
    """Runs a block's jobs, from a job's arrival to its last answer. Subclasses define how a job is run."""

    counts_type: type[BlockCounts] = BlockCounts

    def __init__(self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None) -> None:
        """`tasks`: the task processes that prepare and finish requests, if any; `close` also closes this pool."""
        self.description = description = loaded.description
        self._traces = tools.traces
        self.counts = self.counts_type(tools.metrics, description)
        self.statistics = self.counts.statistics
        self._loop = asyncio.get_running_loop()
        self._tasks = tasks
        self._preparation = Preparation(description.block_id, loaded.task, tools.prepared_memory, tasks, self)
        self._jobs: dict[WorkerJob, None] = {}
        self._probes: deque[Callable[[str], None]] = deque(maxlen=MAX_PROBES)
        self._drained = asyncio.Event()
        self._drained.set()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Return the number of jobs (or of pieces, if jobs are split) that have not started."""
        raise NotImplementedError

    @property
    def idle(self) -> int:
        """Return the number of idle instances."""
        raise NotImplementedError

    # --- jobs come and go

    def accept(self, job: WorkerJob) -> None:
        self._enter(job)
        self._preparation.prepare(job)

    def cancel(self, job: WorkerJob) -> None:
        """Remove a job whose answer is no longer wanted; if the job is running, ignore its result."""
        if not job.is_gone:
            self.counts.cancelled.inc()
            self._forget(job)
            self._preparation.cancel(job)

    def allow(self, job: WorkerJob, credits: int) -> None:
        """Ignore the credits for answers, which only runners that send several answers per job use."""

    def hand_back(self) -> list[WorkerJob]:
        """Remove and return the jobs that have not started."""
        return [job for job in list(self._jobs) if self.recall(job)]

    def recall(self, job: WorkerJob) -> bool:
        if job.is_gone or job.has_started:
            return False
        self._forget(job)
        self._preparation.cancel(job)
        return True

    def probe(self, done: Callable[[str], None]) -> None:
        """Check the model, and call `done` with the problem or an empty text.

        If the model hangs, `done` is not called.
        """
        self._probes.append(done)
        if len(self._probes) == 1:
            self._probe_engine()

    def _on_probed(self, problem: str) -> None:
        waiting, self._probes = self._probes, deque(maxlen=MAX_PROBES)
        for done in waiting:
            done(problem)

    def max_remaining_s(self) -> float:
        """Return the seconds until the last deadline of the block's jobs."""
        return max(0.0, max((job.deadline for job in self._jobs), default=0.0) - now())

    async def drain(self) -> None:
        """Wait until no job is left."""
        await self._drained.wait()

    def close(self) -> asyncio.Event:
        """Fail all jobs and close the engine; return an event that is set when the engine is closed.

        Call this after `drain`, or to abandon running jobs.
        """
        for job in list(self._jobs):
            self.end(job, Draining("the model was unloaded before it answered; send the request again"))
        self.counts.flush()
        if self._tasks is not None:
            self._tasks.close()
        return self._close_engine()

    def _probe_engine(self) -> None:
        """Check the model, and call `_on_probed` with the problem or an empty text."""
        raise NotImplementedError

    def _close_engine(self) -> asyncio.Event:
        raise NotImplementedError

    # --- outcomes

    def on_prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        raise NotImplementedError

    def end(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
        """Send the job's last answer, unless the job has ended or was cancelled."""
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self.counts.count_failure(job, outcome, now())
        else:
            self.counts.count_success(job, now())
        self._forget(job)
        if self._traces.is_on:
            self._record_span(job, outcome)  # before the reply, as a span must end within its parent
        job.reply(job, outcome)

    def _enter(self, job: WorkerJob) -> None:
        job.arrived = now()
        self._jobs[job] = None
        self._drained.clear()

    def _forget(self, job: WorkerJob) -> None:
        job.is_gone = True
        del self._jobs[job]
        if not self._jobs:
            self._drained.set()

    def _record_span(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
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
            **self._span_fields(job),
        )
        span.end(outcome if isinstance(outcome, PenstockError) else None)

    def _span_fields(self, job: WorkerJob) -> dict[str, int]:
        """Return additional fields for the job's span."""
        return {}


class QueueRunner(BlockRunner):
    """Runs a block whose jobs are split into pieces, which wait in a queue for a free instance.

    Subclasses define how an instance runs a batch of pieces, and when a batch is handed out.
    """

    close_s: float | None = None  # time for the instances to finish their work; None means no limit

    def __init__(
        self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None, execution: Execution, batcher: Batcher
    ) -> None:
        super().__init__(loaded, tools, tasks)
        description, cores = loaded.description, tools.cores if loaded.computes_in_callers else None
        self._engine = loaded.engine
        self._execution = execution
        self._instances = InstanceThreads(
            description.model, description.instances, execution.run, self._on_batch_done, cores
        )
        self._batcher = batcher
        self._running = 0  # batches that were handed out to instances
        self._expiry = EarliestTimer(self._expire_due_jobs, EXPIRY_S)
        self._is_pump_due = False

    @property
    def waiting(self) -> int:
        return len(self._batcher)

    @property
    def idle(self) -> int:
        return max(0, self.description.instances - self._running)

    def close(self) -> asyncio.Event:
        self._expiry.cancel()
        return super().close()

    def _close_engine(self) -> asyncio.Event:
        return self._instances.close(self._engine.close, self.close_s)

    def _probe_engine(self) -> None:
        self._instances.run_errand(self._execution.probe, self._on_probed)

    # --- from the queue to the instances

    def on_prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self.end(job, outcome)
            return
        job.prepared = outcome
        job.missing_results = len(outcome.pieces)
        job.results = [None] * job.missing_results
        if not outcome.pieces:
            self._preparation.finish(job)
            return
        job.queued = [
            QueuedPiece(job, i, p.rows, p.length, p.key, job.deadline, job.priority, job.queue_deadline, p.padding)
            for i, p in enumerate(outcome.pieces)
        ]
        self._batcher.append(job.queued, now())
        if self._batcher.due < self._expiry.due_at:
            self._expiry.set(self._batcher.due)
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)  # later, when all pieces that arrive together are in the queue

    def _pump(self) -> None:
        """Give each idle instance a batch while pieces wait."""
        self._is_pump_due = False
        at = now()
        self.expire(at)
        while self._may_hand_out():
            batch = self._batcher.next_batch(at)
            if batch is None:
                break
            self._start(batch)
            self._hand_out(batch)

    def _may_hand_out(self) -> bool:
        return self._running < self.description.instances

    def _start(self, batch: Batch) -> None:
        for entry in batch.entries:
            job: WorkerJob = entry.owner
            if not job.has_started:
                job.has_started = True
                if job.missing_results > 1 and job.queue_deadline < inf:
                    self._batcher.remove_queue_deadline(job.queued)

    def _hand_out(self, batch: Batch) -> None:
        self._running += 1
        self._instances.run(batch)

    # --- time

    def expire(self, at: float) -> None:
        """Fail the jobs whose pieces are past their deadline or queue deadline."""
        if self._batcher.due > at:
            return
        for entry in self._batcher.expire(at):
            error: PenstockError
            if entry.deadline <= at:
                error = DeadlineExceeded("the deadline passed while the request waited on the worker")
            else:
                level = entry.priority
                error = QueueTimeout(
                    f"the request waited longer than its queue policy (level {level}) allows; try again later"
                )
            self.end(entry.owner, error)

    def _expire_due_jobs(self) -> None:
        self.expire(now())
        self._expiry.set(self._batcher.due)

    # --- from the instances to the answers

    def _on_batch_done(self, outcome: BatchOutcome) -> None:
        self._running -= 1
        self._pump()  # first, so that the instance is busy while answers are written
        self._count_and_answer(outcome)

    def _count_and_answer(self, outcome: BatchOutcome) -> None:
        """Count a finished batch, and answer the jobs that it completes."""
        self.counts.count_batch(outcome)
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
                self.end(job, result)
                continue
            job.results[entry.index] = result
            job.missing_results -= 1
            if job.missing_results == 0:
                self._complete(job)

    def _complete(self, job: WorkerJob) -> None:
        self._preparation.finish(job)

    def _forget(self, job: WorkerJob) -> None:
        super()._forget(job)
        if job.missing_results:
            self._batcher.remove(job.queued)
        job.queued = ()  # the pieces refer to the job
