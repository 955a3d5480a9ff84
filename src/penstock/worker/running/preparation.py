"""Requests to pieces and results to answers: on the event loop where the task is quick, in threads, or offloaded."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import structlog

from penstock.core.errors import InternalError, PenstockError
from penstock.core.tensors import Array, Tensor
from penstock.tasks.base import Prepared, Task
from penstock.worker.job import WorkerJob
from penstock.worker.offload.pool import TaskPool
from penstock.worker.offload.process import RemoteContext

log = structlog.get_logger()
T = TypeVar("T")


class Preparation:
    def __init__(
        self,
        task: Task,
        pool: Executor,
        tasks: TaskPool | None,
        prepared: Callable[[WorkerJob, Prepared | PenstockError], None],
        finished: Callable[[WorkerJob, list[Tensor] | PenstockError], None],
    ) -> None:
        """`tasks` take the place of the pool's threads. `prepared` and `finished` are called on the event loop."""
        self._task = task
        self._pool = pool
        self._tasks = tasks
        self._prepared = prepared
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._arrivals: list[WorkerJob] = []
        self._calls: set[asyncio.Task[None]] = set()  # to task processes, one for each job at most
        self._cores = len(os.sched_getaffinity(0))

    # --- on the event loop

    def prepare(self, job: WorkerJob) -> None:
        if self._task.is_prepare_cheap:
            self._prepared(job, self._prepare(job))
        elif self._tasks is not None:
            self._spawn(self._prepare_there(job, self._tasks))
        else:
            if not self._arrivals:
                self._loop.call_soon(self._prepare_arrivals)
            self._arrivals.append(job)

    def finish(self, job: WorkerJob) -> None:
        if self._tasks is not None and job.prepared is not None and isinstance(job.prepared.context, RemoteContext):
            self._spawn(self._finish_there(job, job.prepared.context, self._tasks))
        elif self._task.is_finish_cheap:
            self._finished(job, self._finish(job))
        else:
            future = self._loop.run_in_executor(self._pool, self._finish, job)
            future.add_done_callback(lambda done: self._finished(job, done.result()))

    def _prepare_arrivals(self) -> None:
        """What arrived together goes to the pool together, shared out over its threads."""
        jobs, self._arrivals = self._arrivals, []
        shares = min(len(jobs), self._cores)
        for share in range(shares):
            future = self._loop.run_in_executor(self._pool, self._prepare_group, jobs[share::shares])
            future.add_done_callback(self._group_prepared)

    def _group_prepared(self, future: "asyncio.Future[list[tuple[WorkerJob, Prepared | PenstockError]]]") -> None:
        for job, outcome in future.result():
            self._prepared(job, outcome)

    async def _prepare_there(self, job: WorkerJob, tasks: TaskPool) -> None:
        self._prepared(job, await _outcome(tasks.prepare(job.request)))

    async def _finish_there(self, job: WorkerJob, held: RemoteContext, tasks: TaskPool) -> None:
        start = time.perf_counter_ns()
        outcome = await _outcome(tasks.finish(job.request, held, _results(job)))
        job.timing.finish_ns = time.perf_counter_ns() - start
        self._finished(job, outcome)

    def _spawn(self, call: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

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
            return self._task.finish(job.request, job.prepared, _results(job))
        except PenstockError as error:
            return error
        except Exception as error:
            log.exception("finish_failed", request_id=job.request_id)
            return InternalError(f"finishing the request failed: {type(error).__name__}")
        finally:
            job.timing.finish_ns = time.perf_counter_ns() - start


def _results(job: WorkerJob) -> list[Sequence[Array]]:
    return [result for result in job.results if result is not None]


async def _outcome(call: Awaitable[T]) -> T | PenstockError:
    try:
        return await call
    except PenstockError as error:
        return error
