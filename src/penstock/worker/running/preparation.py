"""Prepares requests and finishes results: on the event loop if the work is quick, in threads, or in task processes."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from typing import Protocol, TypeVar

import structlog

from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    PenstockError,
    RequestTooLarge,
    remove_trace,
)
from penstock.core.tensors import BYTES, Array, Tensor
from penstock.tasks.base import AnyTask, EstimatesMemory, Prepared, PreparesInline, TaskRequest
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.control_groups import count_usable_cores
from penstock.worker.offload.task_pool import TaskPool
from penstock.worker.offload.task_process import RemoteContext
from penstock.worker.running.memory_quota import MemoryQuota
from penstock.worker.worker_job import WorkerJob

log = structlog.get_logger()
T = TypeVar("T")
Continuation = Callable[[], None]
PreparedMemory = MemoryQuota[Continuation]

# Limits for work on the event loop, so that it takes a few milliseconds at most. Passing work to a thread takes less
# than a tenth of a millisecond.
INLINE_ELEMENTS = 4096
INLINE_BYTES = 1024 * 1024
INLINE_RESULT_BYTES = 256 * 1024
INLINE_PIECES = 64
INLINE_BYTES_PER_TURN = 4096  # of texts that are prepared in one turn of the loop
SMALL_BYTES = 4 * INLINE_ELEMENTS  # tensors up to this size cannot have more elements
# A thread prepares requests for this long, and then passes all of them to the event loop together.
TOGETHER_S = 0.002
FREE_BYTES = 1024 * 1024  # requests up to this size do not wait for memory: a block's credits bound their number


class PreparationOwner(Protocol):
    """The runner whose jobs are prepared. `Preparation` calls its methods on the event loop."""

    def on_prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None: ...

    def end(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
        """Send the job's last answer."""
        ...


class HeldMemory:
    """Memory that a prepared request has taken from the worker's limit.

    Deleting this object returns the memory; the request's job holds the only reference.
    """

    __slots__ = ("_give_back", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, give_back: Continuation) -> None:
        self._loop = loop
        self._give_back = give_back

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop has closed, and the process ends with it
            self._loop.call_soon_threadsafe(self._give_back)


class Preparation:
    """Prepares and finishes one block's requests, in threads of its own, so that blocks do not delay each other."""

    def __init__(
        self,
        block_id: str,
        task: AnyTask,
        prepared_memory: PreparedMemory,
        tasks: TaskPool | None,
        owner: PreparationOwner,
    ) -> None:
        """`tasks`: the task processes to use instead of threads."""
        self._block_id = block_id
        self._task = task
        self._estimate_memory = task.weigh if isinstance(task, EstimatesMemory) else None
        self._inline_bytes = task.inline_bytes if isinstance(task, PreparesInline) else 0
        self._inline_bytes_left = INLINE_BYTES_PER_TURN  # that may still be prepared in this turn of the loop
        self._prepared_memory = prepared_memory
        self._tasks = tasks
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._cores = count_usable_cores()
        self._pool = ThreadPoolExecutor(self._cores, thread_name_prefix="task")  # starts threads on demand
        self._queue: deque[WorkerJob] = deque()  # filled by the loop, emptied by the threads
        self._is_start_scheduled = False
        self._busy = 0  # number of threads that prepare requests
        self._waiting: dict[WorkerJob, Continuation] = {}  # jobs that wait for memory
        self._calls = BackgroundTasks("preparation")  # calls to task processes, at most one per job

    # --- on the event loop

    def prepare(self, job: WorkerJob) -> None:
        if (self._task.is_prepare_cheap and _is_small(job.request)) or self._may_prepare_on_loop(job.request):
            self._owner.on_prepared(job, self._prepare_job(job))
            return
        size_bytes = self._estimate_memory(job.request) if self._estimate_memory is not None else 0
        if size_bytes <= FREE_BYTES:
            self._start_preparing(job)
        elif size_bytes > self._prepared_memory.share_bytes:
            self._owner.on_prepared(
                job,
                RequestTooLarge(
                    f"the request would take {size_bytes} bytes of memory, more than half of limits.max_prepared_bytes "
                    f"({self._prepared_memory.share_bytes}): split the request"
                ),
            )
        else:
            self._wait_for_memory(job, size_bytes)

    def _may_prepare_on_loop(self, request: TaskRequest) -> bool:
        """Return whether to prepare the request on the event loop: only a few small requests in each iteration."""
        size_bytes = sum(len(tensor.data) for tensor in request.inputs)
        if size_bytes > self._inline_bytes or size_bytes > self._inline_bytes_left:
            return False
        if self._tasks is not None and self._tasks.accepts(request):
            return False
        if self._inline_bytes_left == INLINE_BYTES_PER_TURN:
            self._loop.call_soon(self._reset_turn)
        self._inline_bytes_left -= size_bytes + 1
        return True

    def _reset_turn(self) -> None:
        self._inline_bytes_left = INLINE_BYTES_PER_TURN

    def cancel(self, job: WorkerJob) -> None:
        """Drop a job whose preparation has not started, and free its input bytes."""
        if job.prepared is None:
            job.request.inputs.clear()
        if (go := self._waiting.pop(job, None)) is not None:
            self._prepared_memory.withdraw(self._block_id, go)

    def finish(self, job: WorkerJob) -> None:
        if self._tasks is not None and job.prepared is not None and isinstance(job.prepared.context, RemoteContext):
            self._calls.spawn(self._finish_in_process(job, job.prepared.context, self._tasks))
        elif self._task.is_finish_cheap and _is_small_result(job.results):
            self._owner.end(job, self._finish_job(job))
        else:
            future = self._loop.run_in_executor(self._pool, self._finish_job, job)
            future.add_done_callback(lambda done: self._owner.end(job, done.result()))

    def _wait_for_memory(self, job: WorkerJob, size_bytes: int) -> None:
        def enter() -> None:
            self._waiting.pop(job, None)
            job.held_memory = HeldMemory(self._loop, lambda: self._give_memory_back(size_bytes))
            self._start_preparing(job)

        self._waiting[job] = enter
        if self._prepared_memory.enter(self._block_id, size_bytes, enter):
            enter()

    def _give_memory_back(self, size_bytes: int) -> None:
        for go in self._prepared_memory.leave(self._block_id, size_bytes):
            go()

    def _start_preparing(self, job: WorkerJob) -> None:
        if self._tasks is not None and not self._task.is_prepare_cheap and self._tasks.accepts(job.request):
            begun = self._tasks.start_preparing(
                job.request, lambda: not job.is_gone and job.deadline > time.monotonic()
            )
            begun.add_done_callback(lambda done: self._on_prepared_in_process(job, done))
            return
        self._queue.append(job)
        if not self._is_start_scheduled:
            self._is_start_scheduled = True
            self._loop.call_soon(self._start_threads)  # later, when all jobs that arrive together are in the queue

    def _start_threads(self) -> None:
        """Start a thread per waiting job, but not more threads than cores."""
        self._is_start_scheduled = False
        for _ in range(min(len(self._queue), self._cores - self._busy)):
            self._busy += 1
            self._loop.run_in_executor(self._pool, self._prepare_queued).add_done_callback(self._on_queued_prepared)

    def _on_queued_prepared(self, future: "asyncio.Future[list[tuple[WorkerJob, Prepared | PenstockError]]]") -> None:
        self._busy -= 1
        self._start_threads()
        for job, outcome in future.result():
            self._owner.on_prepared(job, outcome)

    def _on_prepared_in_process(self, job: WorkerJob, done: "asyncio.Task[Prepared]") -> None:
        if done.cancelled():  # the loop is closing
            return
        error = done.exception()
        assert error is None or isinstance(error, PenstockError)
        self._owner.on_prepared(job, done.result() if error is None else error)

    async def _finish_in_process(self, job: WorkerJob, context: RemoteContext, tasks: TaskPool) -> None:
        start = time.perf_counter_ns()
        outcome = await _catch_error(tasks.finish(job.request, context, _complete_results(job)))
        job.timing.finish_ns = time.perf_counter_ns() - start
        self._owner.end(job, outcome)

    # --- in threads

    def _prepare_queued(self) -> list[tuple[WorkerJob, Prepared | PenstockError]]:
        """Prepare jobs from the queue for `TOGETHER_S`.

        Skip cancelled jobs, and fail jobs whose deadline has passed.
        """
        done: list[tuple[WorkerJob, Prepared | PenstockError]] = []
        start = time.monotonic()
        while self._queue and (at := time.monotonic()) - start < TOGETHER_S:
            try:
                job = self._queue.popleft()
            except IndexError:  # another thread took the last job
                break
            if job.deadline <= at:
                done.append((job, DeadlineExceeded("the deadline passed before the request was prepared")))
            elif not job.is_gone:
                done.append((job, self._prepare_job(job)))
        return done

    def _prepare_job(self, job: WorkerJob) -> Prepared | PenstockError:
        try:
            return self._task.prepare(job.request)
        except PenstockError as error:
            return remove_trace(error)
        except Exception as error:
            if job.is_gone:
                return Cancelled("the request was cancelled during its preparation")  # its inputs were freed
            log.exception("prepare_failed", request_id=job.request_id)
            return InternalError(f"preparing the request failed: {type(error).__name__}")

    def _finish_job(self, job: WorkerJob) -> list[Tensor] | PenstockError:
        start = time.perf_counter_ns()
        assert job.prepared is not None
        try:
            return self._task.finish(job.request, job.prepared, _complete_results(job))
        except PenstockError as error:
            return remove_trace(error)
        except Exception as error:
            log.exception("finish_failed", request_id=job.request_id)
            return InternalError(f"finishing the request failed: {type(error).__name__}")
        finally:
            job.timing.finish_ns = time.perf_counter_ns() - start


def _is_small(request: TaskRequest) -> bool:
    """Return whether preparing the request is quick: only texts take time, because each becomes an object."""
    for tensor in request.inputs:
        if tensor.datatype != BYTES or len(tensor.data) <= SMALL_BYTES:
            continue
        if len(tensor.data) > INLINE_BYTES or prod(tensor.shape) > INLINE_ELEMENTS:
            return False
    return True


def _is_small_result(results: Sequence[Sequence[Array] | None]) -> bool:
    if len(results) > INLINE_PIECES:
        return False
    size_bytes = 0
    for result in results:
        for array in result or ():
            size_bytes += array.size * INLINE_RESULT_BYTES // INLINE_ELEMENTS if array.dtype.hasobject else array.nbytes
    return size_bytes <= INLINE_RESULT_BYTES


def _complete_results(job: WorkerJob) -> list[Sequence[Array]]:
    return [result for result in job.results if result is not None]


async def _catch_error(call: Awaitable[T]) -> T | PenstockError:
    try:
        return await call
    except PenstockError as error:
        return error
