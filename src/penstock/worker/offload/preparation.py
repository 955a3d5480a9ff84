"""Requests to pieces and results to answers in task processes or task workers: `placement: pool` and `worker`."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor

from penstock.core.errors import PenstockError
from penstock.core.tensors import Array, Tensor
from penstock.tasks.base import Prepared, Task
from penstock.worker.job import WorkerJob
from penstock.worker.offload.pool import TaskPool
from penstock.worker.running.preparation import Preparation


class PoolPreparation(Preparation):
    """What the task does quickly stays on the loop."""

    def __init__(
        self,
        task: Task,
        pool: Executor,
        tasks: TaskPool,
        prepared: Callable[[WorkerJob, Prepared | PenstockError], None],
        finished: Callable[[WorkerJob, list[Tensor] | PenstockError], None],
    ) -> None:
        super().__init__(task, pool, prepared, finished)
        self._tasks = tasks
        self._calls: set[asyncio.Task[None]] = set()  # one for each job at most

    def prepare(self, job: WorkerJob) -> None:
        if self._task.is_prepare_cheap:
            super().prepare(job)
        else:
            self._spawn(self._prepare_there(job))

    def finish(self, job: WorkerJob) -> None:
        if job.prepared is None or not self._tasks.holds(job.prepared):
            super().finish(job)
        else:
            self._spawn(self._finish_there(job, job.prepared))

    async def _prepare_there(self, job: WorkerJob) -> None:
        outcome: Prepared | PenstockError
        try:
            outcome = await self._tasks.prepare(job.request)
        except PenstockError as error:
            outcome = error
        self._prepared(job, outcome)

    async def _finish_there(self, job: WorkerJob, prepared: Prepared) -> None:
        start = time.perf_counter_ns()
        results: list[Sequence[Array]] = [result for result in job.results if result is not None]
        outcome: list[Tensor] | PenstockError
        try:
            outcome = await self._tasks.finish(job.request, prepared, results)
        except PenstockError as error:
            outcome = error
        job.timing.finish_ns = time.perf_counter_ns() - start
        self._finished(job, outcome)

    def _spawn(self, call: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
