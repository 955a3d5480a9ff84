"""What all runners share: a block's jobs from their arrival through its queue and its instances to their answers.

All state is owned by the event loop. Threads only compute: they get a batch or a request
and hand the outcome back to the loop.
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
from penstock.worker.job import WorkerJob
from penstock.worker.offload.pool import TaskPool
from penstock.worker.running.alarm import Alarm
from penstock.worker.running.batcher import Batch, Batcher, QueuedPiece
from penstock.worker.running.cores import Cores
from penstock.worker.running.counts import BlockCounts
from penstock.worker.running.instances import BatchOutcome, Execution, InstanceThreads
from penstock.worker.running.preparation import Preparation, PreparedCalls, PreparedRoom

now = time.monotonic

# Deadlines that pass within this time are seen to together: each look goes over all that waits.
EXPIRY_S = 0.001

MAX_PROBES = 64  # that wait for one answer; the oldest beyond are not told


@dataclass(frozen=True, slots=True)
class WorkerTools:
    """What a worker's blocks share."""

    room: PreparedRoom  # for what is prepared
    metrics: WorkerMetrics
    traces: Traces
    cores: Cores | None = None  # None: instances run wherever there is room


class BlockRunner:
    """A block's jobs, from their arrival to their last answer. Its subclasses say what is done with them between."""

    close_s: float | None = None  # what the instances get to end what they do; None: as long as they take
    counts_as: type[BlockCounts] = BlockCounts

    def __init__(
        self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None, execution: Execution, instances: int
    ) -> None:
        """`tasks` prepare and finish in place of the pool's threads; they are this runner's to close."""
        self.description = description = loaded.description
        self._engine = loaded.engine
        self._execution = execution
        self._traces = tools.traces
        self.counts = self.counts_as(tools.metrics, description)
        self.statistics = self.counts.statistics
        self._loop = asyncio.get_running_loop()
        self._tasks = tasks
        calls = PreparedCalls(self._prepared, self._end)
        self._preparation = Preparation(description.block_id, loaded.task, tools.room, tasks, calls)
        cores = tools.cores if loaded.computes_in_callers else None
        self._instances = InstanceThreads(description.model, instances, execution.run, self._ran, cores)
        self._jobs: dict[WorkerJob, None] = {}
        self._probes: deque[Callable[[str], None]] = deque(maxlen=MAX_PROBES)
        self._drained = asyncio.Event()
        self._drained.set()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """What has not started."""
        raise NotImplementedError

    @property
    def idle(self) -> int:
        """Instances that have nothing to do."""
        raise NotImplementedError

    # --- jobs come and go

    def accept(self, job: WorkerJob) -> None:
        self._enter(job)
        self._preparation.prepare(job)

    def cancel(self, job: WorkerJob) -> None:
        """Nobody wants the answer any more: the job leaves the queue, or its result is dropped when it comes."""
        if not job.is_gone:
            self.counts.cancelled.inc()
            self._forget(job)
            self._preparation.cancel(job)

    def allow(self, job: WorkerJob, credits: int) -> None:
        """Nothing waits for credits where each job has one answer."""

    def hand_back(self) -> list[WorkerJob]:
        """Takes out and returns the jobs of which nothing has run."""
        return [job for job in list(self._jobs) if self.recall(job)]

    def recall(self, job: WorkerJob) -> bool:
        if job.is_gone or job.has_started:
            return False
        self._forget(job)
        self._preparation.cancel(job)
        return True

    def probe(self, done: Callable[[str], None]) -> None:
        """Tells, in its turn, whether the model still works: an empty text, or the problem. A hung one never tells."""
        self._probes.append(done)
        if len(self._probes) == 1:
            self._instances.ask(self._execution.probe, self._probed)

    def _probed(self, problem: str) -> None:
        waiting, self._probes = self._probes, deque(maxlen=MAX_PROBES)
        for done in waiting:
            done(problem)

    def longest_s(self) -> float:
        """What the job with the latest deadline has left."""
        return max(0.0, max((job.deadline for job in self._jobs), default=0.0) - now())

    async def drain(self) -> None:
        """Returns when nothing is left to run."""
        await self._drained.wait()

    def close(self) -> asyncio.Event:
        """Call it after `drain`, or to give up what runs. The event: threads have left, the engine is closed."""
        for job in list(self._jobs):
            self._end(job, Draining("the model was unloaded before it had answered; ask again"))
        self.counts.flush()
        if self._tasks is not None:
            self._tasks.close()
        return self._instances.close(self._engine.close, self.close_s)

    # --- what becomes of them

    def _prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        raise NotImplementedError

    def _ran(self, outcome: BatchOutcome) -> None:
        raise NotImplementedError

    def _end(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
        """Answers the job, for the last time, if it is still here."""
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self.counts.failed(job, outcome, now())
        else:
            self.counts.succeeded(job, now())
        self._forget(job)
        if self._traces.is_on:
            self._trace(job, outcome)  # before the reply: a span ends within its parent
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

    def _trace(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
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
            **self._traced(job),
        )
        span.end(outcome if isinstance(outcome, PenstockError) else None)

    def _traced(self, job: WorkerJob) -> dict[str, int]:
        """What else a span tells of the job."""
        return {}


class QueueRunner(BlockRunner):
    """A block whose jobs' pieces wait in line for its instances. Its subclasses say what those execute, and what is
    handed to them when."""

    def __init__(
        self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None, execution: Execution, batcher: Batcher
    ) -> None:
        super().__init__(loaded, tools, tasks, execution, loaded.description.instances)
        self._batcher = batcher
        self._running = 0  # batches handed out
        self._expiry = Alarm(self._expire_due, EXPIRY_S)
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

    # --- from the queue to the instances

    def _prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self._end(job, outcome)
            return
        job.prepared = outcome
        job.missing = len(outcome.pieces)
        job.results = [None] * job.missing
        if not outcome.pieces:
            self._preparation.finish(job)
            return
        job.queued = [
            QueuedPiece(job, i, p.rows, p.length, p.key, job.deadline, job.priority, job.queue_deadline, p.padding)
            for i, p in enumerate(outcome.pieces)
        ]
        self._batcher.append(job.queued, now())
        if self._batcher.due < self._expiry.at:
            self._expiry.set(self._batcher.due)
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)  # when all that has arrived together is in line

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
            self._hand_out(batch)

    def _may_hand_out(self) -> bool:
        return self._running < self.description.instances

    def _start(self, batch: Batch) -> None:
        for entry in batch.entries:
            job: WorkerJob = entry.owner
            if not job.has_started:
                job.has_started = True
                if job.missing > 1 and job.queue_deadline < inf:
                    self._batcher.excuse(job.queued)

    def _hand_out(self, batch: Batch) -> None:
        self._running += 1
        self._instances.run(batch)

    # --- time

    def expire(self, at: float) -> None:
        """Fails what waits past its deadline, or longer than its queue policy allows."""
        if self._batcher.due > at:
            return
        for entry in self._batcher.expire(at):
            error: PenstockError
            if entry.deadline <= at:
                error = DeadlineExceeded("the deadline passed while the request waited on the worker")
            else:
                level = entry.priority
                error = QueueTimeout(f"it waited longer than the queue policy of level {level} allows; try again later")
            self._end(entry.owner, error)

    def _expire_due(self) -> None:
        self.expire(now())
        self._expiry.set(self._batcher.due)

    # --- from the instances to the answers

    def _ran(self, outcome: BatchOutcome) -> None:
        self._running -= 1
        self._pump()  # first, so that the instance does not idle while answers are written
        self._settle(outcome)

    def _settle(self, outcome: BatchOutcome) -> None:
        """Counts the batch and answers the jobs that it completes."""
        self.counts.ran(outcome)
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
                self._end(job, result)
                continue
            job.results[entry.index] = result
            job.missing -= 1
            if job.missing == 0:
                self._complete(job)

    def _complete(self, job: WorkerJob) -> None:
        self._preparation.finish(job)

    def _forget(self, job: WorkerJob) -> None:
        super()._forget(job)
        if job.missing:
            self._batcher.remove(job.queued)
        job.queued = ()  # they refer to the job
