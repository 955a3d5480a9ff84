"""One run for identical requests in flight: its answer is for all who wait for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Generic, TypeAlias, TypeVar, cast

import structlog

from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InvalidRequest,
    ModelNotReady,
    RequestTooLarge,
    from_code,
)

log = structlog.get_logger()
T = TypeVar("T")
Run: TypeAlias = Callable[[float], Awaitable[T]]  # by a deadline
Keep: TypeAlias = Callable[[T], Awaitable[None]]
# About the request or its block: whoever asks the same gets the same. Any other failure was the one run's own.
FOR_ALL = (InvalidRequest, RequestTooLarge, EngineFailed, ModelNotReady, Draining)
CLOSE_S = 5.0


class FlightPart(Enum):
    """A caller's part in the flight that brought its answer."""

    LED = "led"
    FOLLOWED = "followed"
    CAME_LATE = "came_late"  # the answer was there, and being kept


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    waiters: dict[asyncio.Future[bool], None] = field(default_factory=dict)  # in the order of their arrival
    task: asyncio.Task[None] | None = None
    has_landed: bool = False
    answer: T | None = None
    error: BaseException | None = None

    def land(self) -> None:
        self.has_landed = True
        for waiter in self.waiters:
            _settle(waiter, True)


class Flights(Generic[T]):
    """A flight is a task of its own: it goes on when its leader leaves, and ends when nobody waits any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flights: dict[bytes, _Flight[T]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._flights)

    async def share(self, key: bytes, deadline: float, run: Run[T], keep: Keep[T]) -> tuple[T, FlightPart]:
        """Whoever comes first leads: its `run` gets its deadline. Waiters keep their own deadlines.

        When a flight fails by chance (its leader's deadline, a worker's death), one of those who wait leads the
        next, and the others follow it; nobody leads twice. `keep` runs after the waiters have their answer, and
        those who come meanwhile get it, too.
        """
        while True:
            if self._is_closed:
                raise Draining("this gateway is leaving")
            flight = self._flights.get(key)
            part = (
                FlightPart.LED if flight is None else FlightPart.CAME_LATE if flight.has_landed else FlightPart.FOLLOWED
            )
            if flight is None:
                flight = self._start(key, deadline, run, keep)
            if part is not FlightPart.CAME_LATE:
                # The run holds the leader's deadline, and says more of its end than a timer could.
                await self._wait(key, flight, None if part is FlightPart.LED else deadline)
            if flight.error is None:
                return cast(T, flight.answer), part
            if part is FlightPart.LED:
                raise flight.error
            if isinstance(flight.error, FOR_ALL):
                # One for each: an error that is raised collects where it has been.
                raise from_code(flight.error.code, flight.error.message, flight.error.fields) from flight.error
            if self._clock() >= deadline:
                raise _too_late()

    async def close(self) -> None:
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def _start(self, key: bytes, deadline: float, run: Run[T], keep: Keep[T]) -> _Flight[T]:
        flight: _Flight[T] = _Flight()
        self._flights[key] = flight
        flight.task = asyncio.create_task(self._fly(key, flight, deadline, run, keep), name="flight")
        self._tasks.add(flight.task)
        flight.task.add_done_callback(partial(self._ended, key, flight))
        return flight

    async def _fly(self, key: bytes, flight: _Flight[T], deadline: float, run: Run[T], keep: Keep[T]) -> None:
        answer = flight.answer = await run(deadline)
        flight.land()
        await keep(answer)
        # Where keeping took no time, before anybody else runs: from here on the store answers.
        self._remove(key, flight)

    async def _wait(self, key: bytes, flight: _Flight[T], deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        flight.waiters[waiter] = None
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            timer = loop.call_later(max(0.0, deadline - self._clock()), _settle, waiter, False)
        try:
            if not await waiter:
                raise _too_late()
        finally:
            if timer is not None:
                timer.cancel()
            del flight.waiters[waiter]
            if not flight.waiters and not flight.has_landed:
                self._abandon(key, flight)

    def _abandon(self, key: bytes, flight: _Flight[T]) -> None:
        # At once, so that nobody joins what is about to end.
        self._remove(key, flight)
        assert flight.task is not None
        flight.task.cancel()

    def _ended(self, key: bytes, flight: _Flight[T], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._remove(key, flight)
        error = Cancelled("the run was cancelled") if task.cancelled() else task.exception()
        if not flight.has_landed:
            flight.error = error
            flight.land()
        elif error is not None and not task.cancelled():
            log.error("cache_keep_failed", error=str(error), exc_info=error)

    def _remove(self, key: bytes, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


def _settle(waiter: asyncio.Future[bool], has_landed: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_landed)


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed while an identical request ran")
