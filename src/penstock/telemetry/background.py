"""Background tasks of one owner: one-off tasks, and supervised loops that log an exception and continue."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import structlog

if TYPE_CHECKING:
    from penstock.telemetry.metrics import BackgroundMetrics

log = structlog.get_logger()
T = TypeVar("T")
DEADLINE_S = 30.0  # for one pass
RETRY_S = 0.5  # pause after a failed pass of a loop without a period
FAILING_PASSES = 3  # a role is unready after this number of failed passes in a row, over at least FAILING_S
FAILING_S = 5.0
Pass = Callable[[], Awaitable[object] | None]
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]

# All loops of the process, like `asyncio.all_tasks()`, because the process is ready only if no loop keeps failing.
_loops: "WeakSet[SupervisedLoop]" = WeakSet()


def list_supervised_loops() -> "list[SupervisedLoop]":
    return list(_loops)


def describe_failing_loop() -> str:
    """Return which supervised loop keeps failing, as the reason why the process is not ready, or an empty text."""
    names = sorted(loop.name for loop in _loops if loop.is_failing)
    return f"background loop '{names[0]}' keeps failing; the log says why" if names else ""


class BackgroundTasks:
    """The background tasks of one owner, which end when the owner closes them."""

    def __init__(
        self,
        owner: str,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Create the owner's tasks. `on_failure` is called with the exception of each one-off task that fails."""
        self._owner = owner
        self._on_failure = on_failure
        self._clock = clock
        self._sleep = sleep
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, T], has_caller: bool = False) -> "asyncio.Task[T]":
        """Run the coroutine once as a task. Log its failure, unless a caller awaits the task (`has_caller`)."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._retrieve_exception if has_caller else self._on_done)
        return task

    def supervise(
        self,
        name: str,
        run_pass: Pass,
        every: float | Callable[[], float] = 0.0,
        deadline_s: float | None = DEADLINE_S,
    ) -> "asyncio.Task[None]":
        """Run `run_pass` repeatedly, with a pause of `every` seconds, until the task is cancelled.

        A pass is a function or a coroutine function. A coroutine that takes longer than `deadline_s` fails. Pass None
        as the deadline if a pass waits for an event or follows one connection.
        """
        loop = SupervisedLoop(name, run_pass, every, deadline_s, self._clock, self._sleep)
        task = self.spawn(loop.run())
        task.set_name(name)
        return task

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self, timeout_s: float | None = None) -> None:
        """Cancel all tasks and wait until they have ended, at most `timeout_s`."""
        self.cancel()
        await self.wait(timeout_s)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all tasks have ended, at most `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(f"{self._owner}_task_failed", error=repr(error))
            self._on_failure(error)

    def _retrieve_exception(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: the caller received it or has left


class SupervisedLoop:
    """An endless loop of a task or a thread, which continues after exceptions."""

    def __init__(
        self,
        name: str,
        run_pass: Pass,
        every: float | Callable[[], float] = 0.0,
        deadline_s: float | None = DEADLINE_S,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.name = name
        self.run_pass = run_pass
        self._every = every
        self._deadline_s = deadline_s
        self._clock = clock
        self._sleep = sleep
        self._failures = 0  # failed passes in a row
        self._first_failure_at = self._last_failure_at = 0.0  # of the failed passes in a row
        self._kind: type[Exception] | None = None  # type of the last failure
        self._pass_began_at: float | None = None  # None: no pass runs

    @property
    def is_failing(self) -> bool:
        """True if the latest passes all failed. A pass that has run for FAILING_S counts as working."""
        if self._failures < FAILING_PASSES or self._last_failure_at - self._first_failure_at < FAILING_S:
            return False
        return self._pass_began_at is None or self._clock() - self._pass_began_at < FAILING_S

    def begin(self) -> None:
        """Register the loop: until `end`, the role is not ready while the loop keeps failing."""
        _loops.add(self)

    def end(self) -> None:
        _loops.discard(self)

    async def run(self) -> None:
        self.begin()
        try:
            while True:
                await self._sleep(await self._run_once())
        finally:
            self.end()

    def run_in_thread(self, is_over: Callable[[], bool]) -> None:
        """Call `run_pass`, which must not be a coroutine function, in this thread until `is_over` returns True.

        The owner of the loop calls `begin` and `end` in the event loop's thread, because readiness is checked there.
        """
        while not is_over():
            self._pass_began_at = self._clock()
            try:
                self.run_pass()
            except Exception as error:  # noqa: BLE001 - the loop must survive every exception
                self._record_failure(error)
                time.sleep(RETRY_S)
            else:
                self._record_success()
            finally:
                self._pass_began_at = None

    async def _run_once(self) -> float:
        """Run one pass and return the pause after it."""
        self._pass_began_at = self._clock()
        pause_s = RETRY_S
        try:
            if (awaited := self.run_pass()) is not None:
                async with asyncio.timeout(self._deadline_s):
                    await awaited
            pause_s = self._every() if callable(self._every) else self._every
        except Exception as error:  # noqa: BLE001 - the loop must survive every exception
            self._record_failure(error)
            return (0.0 if callable(self._every) else self._every) or RETRY_S
        else:
            self._record_success()
            return pause_s
        finally:
            self._pass_began_at = None

    def _record_failure(self, error: Exception) -> None:
        self._last_failure_at = self._clock()
        if not self._failures:
            self._first_failure_at = self._last_failure_at
        self._failures += 1
        _get_metrics().failures.labels(self.name).inc()
        if type(error) is not self._kind:
            self._kind = type(error)
            log.error("background_loop_failed", loop=self.name, exc_info=error)

    def _record_success(self) -> None:
        if self._failures:
            log.info("background_loop_recovered", loop=self.name, failures=self._failures)
            self._failures, self._kind = 0, None


@cache
def _get_metrics() -> "BackgroundMetrics":
    # Created at the first failure, when the process has certainly called `share_metrics`.
    from prometheus_client import CollectorRegistry

    from penstock.telemetry.metrics import BackgroundMetrics

    return BackgroundMetrics(CollectorRegistry())
