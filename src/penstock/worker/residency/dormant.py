"""A block that is not in memory: takes its jobs, has it loaded, and hands them to its runner when that is there."""

import time
from collections.abc import Callable

from penstock.core.blocks import BlockDescription
from penstock.core.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, Unavailable
from penstock.core.statistics import BlockStatistics
from penstock.telemetry.metrics import WorkerMetrics
from penstock.worker.job import Holder, WorkerJob
from penstock.worker.running.budget import credits_of

now = time.monotonic
LEAST_CAPACITY = 64  # every gateway has a credit, however few a block has


class Dormant:
    """A Holder. What was handed over stays reachable through it: who gave it a job need not know where that is."""

    def __init__(
        self,
        description: BlockDescription,
        wake: Callable[[], None],
        statistics: BlockStatistics,
        metrics: WorkerMetrics,
    ) -> None:
        """`wake` is called with every job that waits; `statistics` are the block's while no runner counts."""
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
            self._fail(job, QueueFull(f"{capacity} requests wait for model '{description.model}' to be loaded"))
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
        """The block is loaded: its jobs run there, in the order of their arrival."""
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
        """Takes out and returns all that waits: nothing of it has run."""
        waiting, self._waiting = self._waiting, {}
        for job in waiting:
            job.is_gone = True
        return list(waiting)

    def fail(self, reason: str, kind: type[Unavailable] = ModelNotReady) -> None:
        """The block could not be loaded."""
        description = self.description
        error = kind(f"model '{description.model}' version {description.version} failed to load: {reason}")
        for job in list(self._waiting):
            self._fail(job, error)

    def expire(self, at: float, why: str, kind: type[Unavailable] = ModelNotReady) -> None:
        """Fails what has waited for as long as it may; `why` says what the load waits for."""
        max_waiting_s = self.description.settings.residence.max_waiting_s
        for job in list(self._waiting):
            if job.deadline <= at:
                self._fail(job, DeadlineExceeded(f"the deadline passed before the model was loaded: {why}"))
            elif job.arrived + max_waiting_s <= at:
                model = self.description.model
                self._fail(job, kind(f"model '{model}' was not loaded within {max_waiting_s:g} s: {why}"))

    def _fail(self, job: WorkerJob, error: PenstockError) -> None:
        self._waiting.pop(job, None)
        job.is_gone = True
        self._statistics.fail.add(int((now() - job.arrived) * 1e9))
        self._metrics.failures.labels(*self._labels, error.code).inc()
        job.reply(job, error)
