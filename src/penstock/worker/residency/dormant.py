"""The queue of a block that is not in memory: keeps jobs until the block is loaded, and passes them to its runner."""

import time
from collections.abc import Callable

from penstock.core.blocks import BlockDescription
from penstock.core.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, Unavailable
from penstock.core.statistics import BlockStatistics
from penstock.telemetry.metrics import WorkerMetrics
from penstock.worker.running.budget import credits_of
from penstock.worker.worker_job import Holder, WorkerJob

now = time.monotonic
LEAST_CAPACITY = 64  # jobs that may wait even if the block has few credits, because every gateway has at least one


class DormantBlock:
    """Holds a block's jobs until the block is loaded; afterwards, forwards calls about these jobs to the runner."""

    def __init__(
        self,
        description: BlockDescription,
        wake: Callable[[], None],
        statistics: BlockStatistics,
        metrics: WorkerMetrics,
    ) -> None:
        """`wake` requests the load of the block, and is called for every job; `statistics` counts failed jobs."""
        self.description = description
        self._wake = wake
        self._statistics = statistics
        self._metrics = metrics
        self._labels = (description.model, description.version)
        self._waiting: dict[WorkerJob, None] = {}
        self._runner: Holder | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def accept(self, job: WorkerJob) -> None:
        job.arrived = now()
        description = self.description
        capacity = max(LEAST_CAPACITY, credits_of(description.settings, description.instances))
        if len(self._waiting) >= capacity:
            self._fail_job(job, QueueFull(f"{capacity} requests wait for model '{description.model}' to be loaded"))
            return
        self._waiting[job] = None
        self._wake()

    def cancel(self, job: WorkerJob) -> None:
        if job in self._waiting:
            del self._waiting[job]
            job.is_gone = True
            self._metrics.cancelled.labels(*self._labels).inc()
        elif self._runner is not None:
            self._runner.cancel(job)

    def allow(self, job: WorkerJob, credits: int) -> None:
        if job in self._waiting:
            job.response_credits += credits
        elif self._runner is not None:
            self._runner.allow(job, credits)

    def hand_over(self, runner: Holder) -> None:
        """Pass the waiting jobs to the loaded block's runner, in the order of arrival."""
        self._runner = runner
        waiting, self._waiting = self._waiting, {}
        for job in waiting:
            runner.accept(job)

    def recall(self, job: WorkerJob) -> bool:
        if job in self._waiting:
            del self._waiting[job]
            job.is_gone = True
            return True
        return self._runner is not None and self._runner.recall(job)

    def hand_back(self) -> list[WorkerJob]:
        """Remove and return all waiting jobs; none of them has run."""
        waiting, self._waiting = self._waiting, {}
        for job in waiting:
            job.is_gone = True
        return list(waiting)

    def fail(self, reason: str, error_type: type[Unavailable] = ModelNotReady) -> None:
        """Fail all waiting jobs, because the block could not be loaded."""
        description = self.description
        error = error_type(f"model '{description.model}' version {description.version} failed to load: {reason}")
        for job in list(self._waiting):
            self._fail_job(job, error)

    def expire(self, at: float, reason: str, error_type: type[Unavailable] = ModelNotReady) -> None:
        """Fail the jobs that have waited too long; `reason` says why the block is not loaded yet."""
        max_waiting_s = self.description.settings.residence.max_waiting_s
        for job in list(self._waiting):
            if job.deadline <= at:
                self._fail_job(job, DeadlineExceeded(f"the deadline passed before the model was loaded: {reason}"))
            elif job.arrived + max_waiting_s <= at:
                model = self.description.model
                self._fail_job(job, error_type(f"model '{model}' was not loaded within {max_waiting_s:g} s: {reason}"))

    def _fail_job(self, job: WorkerJob, error: PenstockError) -> None:
        self._waiting.pop(job, None)
        job.is_gone = True
        self._statistics.fail.add(int((now() - job.arrived) * 1e9))
        self._metrics.failures.labels(*self._labels, error.code).inc()
        job.reply(job, error)
