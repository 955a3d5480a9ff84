"""The task processes or task workers of a worker, and each block's use of them: tasks off its interpreter."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from penstock.core.backoff import Backoff
from penstock.core.errors import ConfigError, Draining, InternalError, PenstockError, Unavailable
from penstock.core.tensors import Array, Tensor
from penstock.models.building import TaskSpec
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Prepared, TaskRequest
from penstock.wire.ipc.arena import Arena
from penstock.worker.offload.peer import TaskPeer, connect_worker, start_process
from penstock.worker.offload.process import ContextLost, ProcessLost, RemoteContext, TaskProcess

log = structlog.get_logger()
T = TypeVar("T")
Reach = Callable[[Sequence[Arena]], TaskPeer]  # starts a process, or connects to a task worker
LEAST_BYTES = 1024  # the way to a process and back costs more than preparing less
ATTEMPTS = 3  # a request over which so many processes died may be why they did
START_S = 60.0  # what calls wait for a process to be there
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0


class TaskProcesses:
    """Has one of each peer at all times, from the first block that needs them to `close`."""

    def __init__(self, peers: Sequence[Reach]) -> None:
        self._peers = peers
        self._specs: dict[int, TaskSpec] = {}  # of the blocks that use them
        self._numbers = itertools.count(1)
        self._alive: list[TaskProcess] = []
        self._changed = asyncio.Event()  # set, and replaced, when a process comes up or has one more task
        self._keepers: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def open(self, spec: TaskSpec, least_bytes: int = 0) -> "TaskPool":
        """Raises where the processes cannot build the task."""
        number = next(self._numbers)
        self._specs[number] = spec
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(reach)) for reach in self._peers]
        try:
            await asyncio.gather(*(self._equip(process) for process in self._alive), return_exceptions=True)
            process = await self.pick(number)
            if (failure := process.built[number]) is not None:
                raise failure
        except BaseException:
            self.drop(number)
            raise
        return TaskPool(self, number, least_bytes)

    async def close(self) -> None:
        """Returns when all have ended."""
        self._is_closed = True
        self._tell()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def pids(self) -> list[int]:
        return [process.pid for process in self._alive]

    def drop(self, number: int) -> None:
        del self._specs[number]
        for process in self._alive:
            self.run(process.drop(number))

    def run(self, call: Coroutine[None, None, T]) -> "asyncio.Task[T]":
        """Runs the call to its end, even if its caller leaves: a process in the middle of a call cannot be told."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # seen by the caller, if it still waits

    async def pick(self, number: int) -> TaskProcess:
        """The least loaded; waits where none is up."""
        if not (ready := self._ready(number)):
            try:
                async with asyncio.timeout(START_S):
                    while not (ready := self._ready(number)):
                        await self._changed.wait()
            except TimeoutError as error:
                raise Unavailable("no task process is up; try again later") from error
        return min(ready, key=lambda process: process.load)

    def _ready(self, number: int) -> list[TaskProcess]:
        if self._is_closed:
            raise Draining("the worker is leaving; send the request again")
        return [process for process in self._alive if number in process.built and not process.ended.is_set()]

    async def _keep(self, reach: Reach) -> None:
        """Opens a process again whenever the one before has ended."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            started = time.monotonic()
            try:
                await self._live(reach)
            except (ProcessLost, OSError) as error:
                log.error("task_process_failed", error=repr(error))
            await asyncio.sleep(backoff.died(time.monotonic() - started))

    async def _live(self, reach: Reach) -> None:
        """Opens a process and returns when it has ended."""
        process = await TaskProcess.open(reach)
        try:
            await self._equip(process)
            self._alive.append(process)
            self._tell()
            await process.ended.wait()
            log.warning("task_process_ended", pid=process.pid)
        finally:
            if process in self._alive:
                self._alive.remove(process)
            await process.close()

    async def _equip(self, process: TaskProcess) -> None:
        """Builds in it what it has not got yet."""
        while missing := [number for number in self._specs if number not in process.built]:
            await process.build(missing[0], self._specs[missing[0]])
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class TaskPool:
    """A block's way to the task processes, in place of its worker's threads."""

    def __init__(self, processes: TaskProcesses, number: int, least_bytes: int = 0) -> None:
        """What has less than `least_bytes` is prepared by the worker itself."""
        self._processes = processes
        self._number = number
        self._least_bytes = least_bytes
        self._is_closed = False

    def takes(self, request: TaskRequest) -> bool:
        return not self._least_bytes or sum(len(tensor.data) for tensor in request.inputs) >= self._least_bytes

    async def prepare(self, request: TaskRequest, is_wanted: Callable[[], bool] = lambda: True) -> Prepared:
        """Raises Cancelled where nobody wants it any more when a process is free for it."""
        return await asyncio.shield(self.begin(request, is_wanted))

    def begin(self, request: TaskRequest, is_wanted: Callable[[], bool] = lambda: True) -> "asyncio.Task[Prepared]":
        """The same for who does not wait; the task must not be cancelled."""
        return self._processes.run(_told(self._prepare(request, is_wanted)))

    async def finish(
        self, request: TaskRequest, held: RemoteContext, results: Sequence[Sequence[Array]]
    ) -> list[Tensor]:
        """Only for a request whose context was left in a process; the worker's own task finishes any other."""
        return await asyncio.shield(self._processes.run(_told(self._finish(request, held, results))))

    def close(self) -> None:
        """Call it after the block's last request."""
        if not self._is_closed:
            self._is_closed = True
            self._processes.drop(self._number)

    async def _prepare(self, request: TaskRequest, is_wanted: Callable[[], bool] = lambda: True) -> Prepared:
        for _ in range(ATTEMPTS):
            process = await self._processes.pick(self._number)
            try:
                return await process.prepare(self._number, request, is_wanted)
            except ProcessLost:
                log.warning("task_process_lost", doing="prepare", pid=process.pid)
        raise Unavailable("the processes that prepared the request died over it; try again later")

    async def _finish(
        self, request: TaskRequest, held: RemoteContext, results: Sequence[Sequence[Array]]
    ) -> list[Tensor]:
        for attempt in range(ATTEMPTS):
            if attempt:
                # What the process kept went with it: another prepares the request anew, for the same results.
                held = (await self._prepare(request)).context
            try:
                return await held.process.finish(held, results)
            except (ProcessLost, ContextLost):
                log.warning("task_process_lost", doing="finish", pid=held.process.pid)
        raise Unavailable("the processes that finished the request died over it; try again later")


async def _told(call: Coroutine[None, None, T]) -> T:
    """With what goes wrong as a PenstockError."""
    try:
        return await call
    except PenstockError:
        raise
    except Exception as error:
        log.exception("task_call_failed")
        raise InternalError(f"handing the request to a task process failed: {type(error).__name__}") from error


def choose_place(placement: str, device: str) -> tuple[str, int]:
    """Where requests are prepared, and of how many bytes they are at least."""
    if placement != "auto":
        return placement, 0
    return ("inline", 0) if device == "cpu" else ("pool", LEAST_BYTES)


class TaskPlacement:
    """Where a block's requests are prepared and finished: here, in task processes, in task workers."""

    def __init__(self, processes: int, task_workers: Sequence[Path]) -> None:
        """`processes` of the worker's own; `task_workers` are sockets."""
        self._processes = TaskProcesses([start_process] * processes)
        self._has_workers = bool(task_workers)
        self._workers = TaskProcesses([partial(connect_worker, path) for path in task_workers])

    async def open(self, loaded: LoadedBlock) -> TaskPool | None:
        """None: the worker prepares and finishes the block's requests itself."""
        placement, least_bytes = choose_place(loaded.settings.placement, loaded.signature.device)
        if placement == "worker" and not self._has_workers:
            raise ConfigError("placement: worker needs worker.task_workers above 0 in the server's configuration")
        if placement == "inline" or loaded.task.is_prepare_cheap:
            return None
        processes = self._workers if placement == "worker" else self._processes
        return await processes.open(loaded.spec, least_bytes)

    async def close(self) -> None:
        await self._processes.close()
        await self._workers.close()
