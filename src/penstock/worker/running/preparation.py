"""Requests to pieces and results to answers: on the event loop where that is quick, in threads, or offloaded."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import structlog

from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    PenstockError,
    RequestTooLarge,
    without_trace,
)
from penstock.core.tensors import BYTES, Array, Tensor
from penstock.tasks.base import Brisk, Prepared, Task, TaskRequest, Weighing
from penstock.telemetry.control_groups import usable_cores
from penstock.worker.job import WorkerJob
from penstock.worker.offload.pool import TaskPool
from penstock.worker.offload.process import RemoteContext
from penstock.worker.running.room import Room

log = structlog.get_logger()
T = TypeVar("T")
Go = Callable[[], None]
PreparedRoom = Room[Go]

# What is quick on the loop, at most some milliseconds: more goes to a thread, which costs less than a tenth of one.
INLINE_ELEMENTS = 4096
INLINE_BYTES = 1024 * 1024
INLINE_RESULT_BYTES = 256 * 1024
INLINE_PIECES = 64
BRISK_AT_ONCE = 4096  # bytes of texts, in one turn of the loop
SMALL_BYTES = 4 * INLINE_ELEMENTS  # so many cannot have more elements
# Requests are prepared one after the other in a thread for so long, and then all are told of together.
TOGETHER_S = 0.002
FREE_BYTES = 1024 * 1024  # what takes less waits for no room: a block's credits bound how many there are


@dataclass(frozen=True, slots=True)
class PreparedCalls:
    """Called on the event loop with what became of a job."""

    prepared: Callable[[WorkerJob, Prepared | PenstockError], None]
    finished: Callable[[WorkerJob, list[Tensor] | PenstockError], None]


class HeldRoom:
    """Room that a job has, until nothing refers to the job any more: what was prepared for it is gone, too."""

    __slots__ = ("_give_back", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, give_back: Go) -> None:
        self._loop = loop
        self._give_back = give_back

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop has closed, and the process will
            self._loop.call_soon_threadsafe(self._give_back)


class Preparation:
    """A block's: its threads are its own, so that no other block waits for them."""

    def __init__(
        self, block_id: str, task: Task, room: PreparedRoom, tasks: TaskPool | None, calls: PreparedCalls
    ) -> None:
        """`tasks` take the place of threads."""
        self._block_id = block_id
        self._task = task
        self._weigh = task.weigh if isinstance(task, Weighing) else None
        self._brisk_bytes = task.brisk_bytes if isinstance(task, Brisk) else 0
        self._brisk_left = BRISK_AT_ONCE  # of this turn of the loop
        self._room = room
        self._tasks = tasks
        self._prepared = calls.prepared
        self._finished = calls.finished
        self._loop = asyncio.get_running_loop()
        self._cores = usable_cores()
        self._pool = ThreadPoolExecutor(self._cores, thread_name_prefix="task")  # starts them as they are needed
        self._line: deque[WorkerJob] = deque()  # filled by the loop, emptied by the threads
        self._is_line_due = False
        self._busy = 0  # threads that prepare
        self._waiting: dict[WorkerJob, Go] = {}  # for room
        self._calls: set[asyncio.Task[None]] = set()  # to task processes, one for each job at most

    # --- on the event loop

    def prepare(self, job: WorkerJob) -> None:
        if (self._task.is_prepare_cheap and _is_small(job.request)) or self._is_brisk(job.request):
            self._prepared(job, self._prepare(job))
            return
        size_bytes = self._weigh(job.request) if self._weigh is not None else 0
        if size_bytes <= FREE_BYTES:
            self._begin(job)
        elif size_bytes > self._room.share_bytes:
            self._prepared(
                job,
                RequestTooLarge(
                    f"the request would take {size_bytes} bytes of memory, over half of limits.max_prepared_bytes "
                    f"({self._room.share_bytes}): send less at a time"
                ),
            )
        else:
            self._ask_for_room(job, size_bytes)

    def _is_brisk(self, request: TaskRequest) -> bool:
        """Of those that come at once the first few: a thread would have to be waited for, and has more done sooner."""
        size_bytes = sum(len(tensor.data) for tensor in request.inputs)
        if size_bytes > self._brisk_bytes or size_bytes > self._brisk_left:
            return False
        if self._tasks is not None and self._tasks.takes(request):
            return False
        if self._brisk_left == BRISK_AT_ONCE:
            self._loop.call_soon(self._end_turn)
        self._brisk_left -= size_bytes + 1
        return True

    def _end_turn(self) -> None:
        self._brisk_left = BRISK_AT_ONCE

    def cancel(self, job: WorkerJob) -> None:
        """It is not begun where it has not been; nor does it keep its bytes while it waits."""
        if job.prepared is None:
            job.request.inputs.clear()
        if (go := self._waiting.pop(job, None)) is not None:
            self._room.withdraw(self._block_id, go)

    def finish(self, job: WorkerJob) -> None:
        if self._tasks is not None and job.prepared is not None and isinstance(job.prepared.context, RemoteContext):
            self._spawn(self._finish_there(job, job.prepared.context, self._tasks))
        elif self._task.is_finish_cheap and _is_short(job.results):
            self._finished(job, self._finish(job))
        else:
            future = self._loop.run_in_executor(self._pool, self._finish, job)
            future.add_done_callback(lambda done: self._finished(job, done.result()))

    def _ask_for_room(self, job: WorkerJob, size_bytes: int) -> None:
        def enter() -> None:
            self._waiting.pop(job, None)
            job.room = HeldRoom(self._loop, lambda: self._leave(size_bytes))
            self._begin(job)

        self._waiting[job] = enter
        if self._room.enter(self._block_id, size_bytes, enter):
            enter()

    def _leave(self, size_bytes: int) -> None:
        for go in self._room.leave(self._block_id, size_bytes):
            go()

    def _begin(self, job: WorkerJob) -> None:
        if self._tasks is not None and not self._task.is_prepare_cheap and self._tasks.takes(job.request):
            begun = self._tasks.begin(job.request, lambda: not job.is_gone and job.deadline > time.monotonic())
            begun.add_done_callback(lambda done: self._prepared_there(job, done))
            return
        self._line.append(job)
        if not self._is_line_due:
            self._is_line_due = True
            self._loop.call_soon(self._share_out)  # when all that has arrived together is in line

    def _share_out(self) -> None:
        """Has as many threads at work as there are jobs for."""
        self._is_line_due = False
        for _ in range(min(len(self._line), self._cores - self._busy)):
            self._busy += 1
            self._loop.run_in_executor(self._pool, self._prepare_some).add_done_callback(self._some_prepared)

    def _some_prepared(self, future: "asyncio.Future[list[tuple[WorkerJob, Prepared | PenstockError]]]") -> None:
        self._busy -= 1
        self._share_out()
        for job, outcome in future.result():
            self._prepared(job, outcome)

    def _prepared_there(self, job: WorkerJob, done: "asyncio.Task[Prepared]") -> None:
        if done.cancelled():  # the loop closes
            return
        error = done.exception()
        assert error is None or isinstance(error, PenstockError)
        self._prepared(job, done.result() if error is None else error)

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

    def _prepare_some(self) -> list[tuple[WorkerJob, Prepared | PenstockError]]:
        """Those whose callers have left, or came too late, are not begun."""
        done: list[tuple[WorkerJob, Prepared | PenstockError]] = []
        start = time.monotonic()
        while self._line and (at := time.monotonic()) - start < TOGETHER_S:
            try:
                job = self._line.popleft()
            except IndexError:  # another thread has it
                break
            if job.deadline <= at:
                done.append((job, DeadlineExceeded("the deadline passed before the request was prepared")))
            elif not job.is_gone:
                done.append((job, self._prepare(job)))
        return done

    def _prepare(self, job: WorkerJob) -> Prepared | PenstockError:
        try:
            return self._task.prepare(job.request)
        except PenstockError as error:
            return without_trace(error)
        except Exception as error:
            if job.is_gone:
                return Cancelled("it was cancelled while it was prepared")  # and lost its inputs
            log.exception("prepare_failed", request_id=job.request_id)
            return InternalError(f"preparing the request failed: {type(error).__name__}")

    def _finish(self, job: WorkerJob) -> list[Tensor] | PenstockError:
        start = time.perf_counter_ns()
        assert job.prepared is not None
        try:
            return self._task.finish(job.request, job.prepared, _results(job))
        except PenstockError as error:
            return without_trace(error)
        except Exception as error:
            log.exception("finish_failed", request_id=job.request_id)
            return InternalError(f"finishing the request failed: {type(error).__name__}")
        finally:
            job.timing.finish_ns = time.perf_counter_ns() - start


def _is_small(request: TaskRequest) -> bool:
    """Numbers are not copied, however many; each text becomes an object."""
    for tensor in request.inputs:
        if tensor.datatype != BYTES or len(tensor.data) <= SMALL_BYTES:
            continue
        if len(tensor.data) > INLINE_BYTES or prod(tensor.shape) > INLINE_ELEMENTS:
            return False
    return True


def _is_short(results: Sequence[Sequence[Array] | None]) -> bool:
    if len(results) > INLINE_PIECES:
        return False
    size_bytes = 0
    for result in results:
        for array in result or ():
            size_bytes += array.size * INLINE_RESULT_BYTES // INLINE_ELEMENTS if array.dtype.hasobject else array.nbytes
    return size_bytes <= INLINE_RESULT_BYTES


def _results(job: WorkerJob) -> list[Sequence[Array]]:
    return [result for result in job.results if result is not None]


async def _outcome(call: Awaitable[T]) -> T | PenstockError:
    try:
        return await call
    except PenstockError as error:
        return error
