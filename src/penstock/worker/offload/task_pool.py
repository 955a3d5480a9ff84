"""Keeps a worker's task processes running, and distributes the calls of its blocks among them."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TypeVar

import structlog

from penstock.core.errors import Draining, InternalError, PenstockError, Unavailable
from penstock.core.tensors import Array, Tensor
from penstock.models.building import TaskSpec
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Prepared, TaskRequest
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.backoff import Backoff
from penstock.worker.offload.task_process import ContextLost, ProcessLost, RemoteContext, TaskProcess

log = structlog.get_logger()
T = TypeVar("T")
LEAST_BYTES = 1024  # sending a smaller request to a process costs more than preparing the request in the worker
ATTEMPTS = 3  # after the loss of this many processes, the request itself may be the cause
START_S = 60.0  # how long calls wait for a process that is ready
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0


class TaskProcesses:
    """Keeps a fixed number of task processes running, from the first block that needs them until `close`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._specs: dict[int, TaskSpec] = {}  # of the blocks that use the processes, by the number of their task
        self._numbers = itertools.count(1)
        self._alive: list[TaskProcess] = []
        self._changed = asyncio.Event()  # set and replaced when a process is ready or has built a task
        self._keepers = BackgroundTasks("task_processes")
        self._calls = BackgroundTasks("task_calls")
        self._is_closed = False

    async def open(self, spec: TaskSpec, least_bytes: int = 0) -> "TaskPool":
        """Build a task in all processes and return its pool; raise an error if the task cannot be built."""
        number = next(self._numbers)
        self._specs[number] = spec
        if not len(self._keepers):
            for _ in range(self._count):
                keep = partial(self._run_process_and_wait, Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S))
                self._keepers.supervise("task-process", keep, deadline_s=None)
        try:
            await asyncio.gather(
                *(self._build_missing_tasks(process) for process in self._alive), return_exceptions=True
            )
            process = await self.pick(number)
            if (failure := process.built[number]) is not None:
                raise failure
        except BaseException:
            self.drop(number)
            raise
        return TaskPool(self, number, least_bytes)

    async def close(self) -> None:
        """End all processes, and wait until they have ended."""
        self._is_closed = True
        self._notify_waiters()
        await self._keepers.close()

    def pids(self) -> list[int]:
        return [process.pid for process in self._alive]

    def drop(self, number: int) -> None:
        del self._specs[number]
        for process in self._alive:
            self.run(process.drop(number))

    def run(self, call: Coroutine[None, None, T]) -> "asyncio.Task[T]":
        """Run the call to its end even if the caller is cancelled, because a process cannot interrupt a call."""
        return self._calls.spawn(call, has_caller=True)

    async def pick(self, number: int) -> TaskProcess:
        """Return the process with the fewest calls; wait if no process is ready."""
        if not (ready := self._ready_processes(number)):
            try:
                async with asyncio.timeout(START_S):
                    while not (ready := self._ready_processes(number)):
                        await self._changed.wait()
            except TimeoutError as error:
                raise Unavailable("no task process is running; try again later") from error
        return min(ready, key=lambda process: process.load)

    def _ready_processes(self, number: int) -> list[TaskProcess]:
        if self._is_closed:
            raise Draining("the worker is shutting down; send the request again")
        return [process for process in self._alive if number in process.built and not process.ended.is_set()]

    async def _run_process_and_wait(self, backoff: Backoff) -> None:
        """Run one process until it ends, and then wait for the backoff time."""
        started = time.monotonic()
        try:
            await self._run_process()
        except (ProcessLost, OSError) as error:
            log.error("task_process_failed", error=repr(error))
        await asyncio.sleep(backoff.compute_next_wait_s(time.monotonic() - started))

    async def _run_process(self) -> None:
        """Start a process, and wait until it has ended."""
        process = await TaskProcess.open()
        try:
            await self._build_missing_tasks(process)
            self._alive.append(process)
            self._notify_waiters()
            await process.ended.wait()
            log.warning("task_process_ended", pid=process.pid)
        finally:
            if process in self._alive:
                self._alive.remove(process)
            await process.close()

    async def _build_missing_tasks(self, process: TaskProcess) -> None:
        """Build the tasks that the process does not have yet."""
        while missing := [number for number in self._specs if number not in process.built]:
            await process.build(missing[0], self._specs[missing[0]])
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class TaskPool:
    """Prepares and finishes a block's requests in the task processes, instead of the worker's threads."""

    def __init__(self, processes: TaskProcesses, number: int, least_bytes: int = 0) -> None:
        """`least_bytes`: the worker itself prepares requests that are smaller than this."""
        self._processes = processes
        self._number = number
        self._least_bytes = least_bytes
        self._is_closed = False

    def accepts(self, request: TaskRequest) -> bool:
        return not self._least_bytes or sum(len(tensor.data) for tensor in request.inputs) >= self._least_bytes

    async def prepare(self, request: TaskRequest, is_wanted: Callable[[], bool] = lambda: True) -> Prepared:
        """Prepare a request; raise Cancelled if the request is no longer wanted when a process becomes free."""
        return await asyncio.shield(self.start_preparing(request, is_wanted))

    def start_preparing(
        self, request: TaskRequest, is_wanted: Callable[[], bool] = lambda: True
    ) -> "asyncio.Task[Prepared]":
        """Like `prepare`, but return a Task instead of waiting. Do not cancel the Task."""
        return self._processes.run(_convert_errors(self._prepare_with_retries(request, is_wanted)))

    async def finish(
        self, request: TaskRequest, context: RemoteContext, results: Sequence[Sequence[Array]]
    ) -> list[Tensor]:
        """Finish a request that a task process has prepared, in the process that keeps its context."""
        return await asyncio.shield(
            self._processes.run(_convert_errors(self._finish_with_retries(request, context, results)))
        )

    def close(self) -> None:
        """Drop the block's task. Call this method after the block's last request."""
        if not self._is_closed:
            self._is_closed = True
            self._processes.drop(self._number)

    async def _prepare_with_retries(
        self, request: TaskRequest, is_wanted: Callable[[], bool] = lambda: True
    ) -> Prepared:
        for _ in range(ATTEMPTS):
            process = await self._processes.pick(self._number)
            try:
                return await process.prepare(self._number, request, is_wanted)
            except ProcessLost:
                log.warning("task_process_lost", doing="prepare", pid=process.pid)
        raise Unavailable("the processes that prepared the request died; try again later")

    async def _finish_with_retries(
        self, request: TaskRequest, context: RemoteContext, results: Sequence[Sequence[Array]]
    ) -> list[Tensor]:
        for attempt in range(ATTEMPTS):
            if attempt:
                # The context was lost with its process: prepare the request again in another process. The results of
                # the engine remain valid.
                context = (await self._prepare_with_retries(request)).context
            try:
                return await context.process.finish(context, results)
            except (ProcessLost, ContextLost):
                log.warning("task_process_lost", doing="finish", pid=context.process.pid)
        raise Unavailable("the processes that finished the request died; try again later")


async def _convert_errors(call: Coroutine[None, None, T]) -> T:
    """Await a call and convert any unexpected exception to InternalError."""
    try:
        return await call
    except PenstockError:
        raise
    except Exception as error:
        log.exception("task_call_failed")
        raise InternalError(f"sending the request to a task process failed: {type(error).__name__}") from error


def choose_placement(placement: str, device: str) -> tuple[str, int]:
    """Return `inline` or `pool`, and the size of the smallest request that the pool prepares."""
    if placement != "auto":
        return placement, 0
    return ("inline", 0) if device == "cpu" else ("pool", LEAST_BYTES)


class TaskProcessUse:
    """Owns the worker's task processes, and decides which blocks use them."""

    def __init__(self, processes: int) -> None:
        self._processes = TaskProcesses(processes)

    async def open(self, loaded: LoadedBlock) -> TaskPool | None:
        """Return the block's task pool, or None if the worker prepares and finishes its requests itself."""
        placement, least_bytes = choose_placement(loaded.settings.placement, loaded.signature.device)
        if placement == "inline" or loaded.task.is_prepare_cheap:
            return None
        return await self._processes.open(loaded.spec, least_bytes)

    async def close(self) -> None:
        await self._processes.close()
