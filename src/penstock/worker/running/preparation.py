"""Requests to pieces and results to answers: on the event loop where the task is quick at it, else in a pool."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import structlog

from penstock.core.errors import InternalError, PenstockError
from penstock.core.tensors import Array, Tensor
from penstock.tasks.base import Prepared, Task
from penstock.worker.job import WorkerJob

log = structlog.get_logger()


class Preparation:
    def __init__(
        self,
        task: Task,
        pool: Executor,
        prepared: Callable[[WorkerJob, Prepared | PenstockError], None],
        finished: Callable[[WorkerJob, list[Tensor] | PenstockError], None],
    ) -> None:
        """`prepared` and `finished` are called on the event loop."""
        self._task = task
        self._pool = pool
        self._prepared = prepared
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._arrivals: list[WorkerJob] = []
        self._cores = len(os.sched_getaffinity(0))

    # --- on the event loop

    def prepare(self, job: WorkerJob) -> None:
        if self._task.is_prepare_cheap:
            self._prepared(job, self._prepare(job))
        else:
            if not self._arrivals:
                self._loop.call_soon(self._prepare_arrivals)
            self._arrivals.append(job)

    def finish(self, job: WorkerJob) -> None:
        if self._task.is_finish_cheap:
            self._finished(job, self._finish(job))
        else:
            future = self._loop.run_in_executor(self._pool, self._finish, job)
            future.add_done_callback(lambda done: self._finished(job, done.result()))

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

    def _finish(self, job: WorkerJob) -> list[Tensor] | PenstockError:
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
