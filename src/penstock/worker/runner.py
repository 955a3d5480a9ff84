"""One block on a worker: its task, its engine, its batcher and a thread per instance.

All state is owned by the event loop. Threads only compute: they get a batch or a request
and hand the outcome back to the loop.
"""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor

import structlog

from penstock.core.errors import DeadlineExceeded, InternalError, PenstockError
from penstock.core.statistics import BatchStatistics, BlockStatistics
from penstock.core.tensors import Array, Tensor
from penstock.tasks.base import Prepared
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.batcher import Batch, Batcher, Budget, Entry
from penstock.worker.counts import BlockCounts
from penstock.worker.execution import Execution, Outcome
from penstock.worker.job import WorkerJob
from penstock.worker.loading import LoadedBlock

log = structlog.get_logger()
now = time.monotonic

# A batch whose like took less than this runs on the loop: handing it to a thread and back would cost more.
INLINE_NS = 100_000
INLINE_BYTES = 64 * 1024
INLINE_AFTER = 16  # batches seen
SLOW_DECAY = 0.95  # how soon one slow batch is forgotten

# While this many full batches wait for each instance, one is handed out ahead: an instance goes on with it at once,
# whatever the loop does. Earlier it would only fix what is not yet known to be the best choice.
AHEAD_FROM = 1


class BlockRunner:
    def __init__(
        self,
        loaded: LoadedBlock,
        pool: Executor,
        metrics: WorkerMetrics,
        traces: Traces,
    ) -> None:
        self.description = description = loaded.description
        self.statistics = BlockStatistics(description.block_id, description.model, description.version)
        self._task = loaded.task
        self._engine = loaded.engine
        self._execution = Execution(loaded.task, loaded.engine)
        self._may_run_inline = loaded.has_steady_cost
        self._pool = pool
        self._traces = traces
        self._metrics = BlockCounts(metrics, description)
        batching = description.settings.batching
        self._batcher = Batcher(
            Budget(
                max_rows=batching.max_rows,
                max_tokens=batching.max_tokens,
                max_padding=batching.max_padding,
                free_padding=batching.free_padding,
                max_delay_s=batching.max_delay_ms / 1000,
                by_length=batching.order == "length",
                reach_tokens=batching.reach_tokens,
                share=1 / (2 * description.instances),
            )
        )
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[WorkerJob, None] = {}
        self._running = 0  # batches handed out
        self._plenty_tokens = AHEAD_FROM * description.instances * (batching.max_tokens or 0)
        # One for all instances, so that what is handed out ahead goes to whichever is idle first. It holds at most
        # one batch more than there are instances.
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_instance, args=(i,), name=f"{description.model}-{i}", daemon=True)
            for i in range(description.instances)
        ]
        self._timer: asyncio.TimerHandle | None = None
        self._is_pump_due = False
        self._arrivals: list[WorkerJob] = []
        self._cores = len(os.sched_getaffinity(0))
        self._slowest_ns = 0.0  # of late
        self._drained = asyncio.Event()
        self._drained.set()
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._batcher)

    @property
    def idle(self) -> int:
        return max(0, self.description.instances - self._running)

    # --- on the event loop

    def accept(self, job: WorkerJob) -> None:
        job.arrived = now()
        self._jobs[job] = None
        self._drained.clear()
        if self._task.is_prepare_cheap:
            self._prepared(job, self._prepare(job))
        else:
            if not self._arrivals:
                self._loop.call_soon(self._prepare_arrivals)
            self._arrivals.append(job)

    def _prepare_arrivals(self) -> None:
        """What arrived together goes to the pool together, shared out over its threads."""
        jobs, self._arrivals = self._arrivals, []
        shares = min(len(jobs), self._cores)
        for share in range(shares):
            group = jobs[share::shares]
            future = self._loop.run_in_executor(self._pool, self._prepare_group, group)
            future.add_done_callback(self._group_prepared)

    def _group_prepared(self, future: "asyncio.Future[list[tuple[WorkerJob, Prepared | PenstockError]]]") -> None:
        for job, outcome in future.result():
            self._prepared(job, outcome)

    def cancel(self, job: WorkerJob) -> None:
        """Its answer is not wanted any more: out of the queue, or unheard when it comes."""
        if not job.is_gone:
            self._metrics.cancelled.inc()
            self._batcher.remove(job)
            self._forget(job)

    def hand_back(self) -> list[WorkerJob]:
        """Takes out and returns the jobs of which nothing has run."""
        jobs = [job for job in self._jobs if not job.has_started]
        for job in jobs:
            self._batcher.remove(job)
            self._forget(job)
        return jobs

    def flush_metrics(self) -> None:
        self._metrics.tallies.flush()

    def expire(self, at: float) -> None:
        for entry in self._batcher.expire(at):
            self._fail(entry.owner, DeadlineExceeded("the deadline passed while the request waited on the worker"))

    async def drain(self) -> None:
        """Returns when nothing is left to run."""
        await self._drained.wait()

    def close(self) -> None:
        """After `drain`, or to abandon what runs. The engine closes when its threads have left it."""
        self.flush_metrics()
        if self._timer is not None:
            self._timer.cancel()
        for _ in self._threads:
            self._inbox.put(None)
        threading.Thread(target=self._close_engine, name="closing", daemon=True).start()

    def _close_engine(self) -> None:
        for thread in self._threads:
            thread.join()
        self._engine.close()

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
            self._finish(job)
            return
        self._batcher.append(
            (Entry(job, i, p.rows, p.length, p.key, job.deadline) for i, p in enumerate(outcome.pieces)),
            now(),
        )
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
        while self._may_hand_out():
            batch = self._batcher.next_batch(at)
            if batch is None:
                break
            entries = [entry for entry in batch.entries if entry.deadline > at]
            if len(entries) < len(batch.entries):
                self._fail_expired(batch, at)
                batch.entries = entries
                if not entries:
                    continue
            for entry in entries:
                entry.owner.has_started = True
            if self._is_quick(batch):
                self._settle(self._execution.run(self.description.instances, batch))
            else:
                self._running += 1
                self._inbox.put(batch)
        self._set_timer()

    def _may_hand_out(self) -> bool:
        instances = self.description.instances
        if self._running < instances:
            return True
        return self._running == instances and 0 < self._plenty_tokens <= self._batcher.tokens

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

    def _fail_expired(self, batch: Batch, at: float) -> None:
        for entry in batch.entries:
            if entry.deadline <= at:
                self._fail(
                    entry.owner,
                    DeadlineExceeded("the deadline passed while the request waited on the worker"),
                )

    def _set_timer(self) -> None:
        wake_at = self._batcher.wake_at() if self.idle else None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            self._timer = self._loop.call_later(max(0.0, wake_at - now()), self._pump)

    def _ran(self, outcome: Outcome) -> None:
        self._running -= 1
        self._pump()  # first, so that the instance does not idle while answers are written
        self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        """Counts the batch and answers the jobs that it completes."""
        self._count(outcome)
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
                self._finish(job)

    def _finish(self, job: WorkerJob) -> None:
        if self._task.is_finish_cheap:
            self._finished(job, self._run_finish(job))
        else:
            future = self._loop.run_in_executor(self._pool, self._run_finish, job)
            future.add_done_callback(lambda done: self._finished(job, done.result()))

    def _finished(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self._fail(job, outcome)
            return
        statistics = self.statistics
        statistics.success.add(int((now() - job.arrived) * 1e9))
        statistics.queue.add(job.timing.queue_ns)
        # Per request, as the protocol counts: every job of a batch took the whole batch's time.
        statistics.compute_input.add(job.timing.batch_ns)
        statistics.compute_infer.add(job.timing.compute_ns)
        statistics.compute_output.add(job.timing.finish_ns)
        self._metrics.queue_seconds.observe(job.timing.queue_ns / 1e9)
        self._forget(job)
        if self._traces.is_on:
            self._trace(job)  # before the reply: a span ends within its parent
        job.reply(job, outcome)

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

    def _fail(self, job: WorkerJob, error: PenstockError) -> None:
        if job.is_gone:
            return
        self.statistics.fail.add(int((now() - job.arrived) * 1e9))
        self._metrics.failure(error.code)
        self._forget(job)
        if self._traces.is_on:
            self._trace(job, error)
        job.reply(job, error)

    def _forget(self, job: WorkerJob) -> None:
        job.is_gone = True
        del self._jobs[job]
        if not self._jobs:
            self._drained.set()

    def _count(self, outcome: Outcome) -> None:
        batch, statistics = outcome.batch, self.statistics
        took_ns = outcome.input_ns + outcome.infer_ns + outcome.output_ns
        self._slowest_ns = max(took_ns, self._slowest_ns * SLOW_DECAY)
        statistics.last_inference_ms = int(time.time() * 1000)
        statistics.inference_count += batch.rows
        statistics.execution_count += 1
        statistics.closed[batch.closed] = statistics.closed.get(batch.closed, 0) + 1
        by_rows = statistics.batches.setdefault(batch.rows, BatchStatistics())
        by_rows.compute_input.add(outcome.input_ns)
        by_rows.compute_infer.add(outcome.infer_ns)
        by_rows.compute_output.add(outcome.output_ns)
        self._metrics.batch(batch, outcome.input_ns / 1e9, outcome.infer_ns / 1e9)

    # --- in threads

    def _prepare_group(self, jobs: list[WorkerJob]) -> list[tuple[WorkerJob, Prepared | PenstockError]]:
        return [(job, self._prepare(job)) for job in jobs]

    def _prepare(self, job: WorkerJob) -> Prepared | PenstockError:
        try:
            return self._task.prepare(job.request)
        except PenstockError as error:
            return error
        except Exception as error:
            log.exception("prepare_failed", request_id=job.request_id)
            return InternalError(f"preparing the request failed: {type(error).__name__}")

    def _run_finish(self, job: WorkerJob) -> list[Tensor] | PenstockError:
        start = time.perf_counter_ns()
        assert job.prepared is not None
        try:
            results: list[Sequence[Array]] = [result for result in job.results if result is not None]
            return self._task.finish(job.request, job.prepared, results)
        except PenstockError as error:
            return error
        except Exception as error:
            log.exception("finish_failed", request_id=job.request_id)
            return InternalError(f"finishing the request failed: {type(error).__name__}")
        finally:
            job.timing.finish_ns = time.perf_counter_ns() - start

    def _run_instance(self, instance: int) -> None:
        while (batch := self._inbox.get()) is not None:
            outcome = self._execution.run(instance, batch)
            try:
                self._loop.call_soon_threadsafe(self._ran, outcome)
            except RuntimeError:  # the loop has closed: the process is leaving
                return
