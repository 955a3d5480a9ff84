"""Single flight: identical requests that are in flight at the same time share one run and its answer."""

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
    rebuild_error,
)
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
T = TypeVar("T")
Run: TypeAlias = Callable[[float], Awaitable[T]]  # takes a deadline
Store: TypeAlias = Callable[[T], Awaitable[None]]
# Errors caused by the request or its block: every identical request gets them. Other errors concern one run only.
SHARED_ERRORS = (InvalidRequest, RequestTooLarge, EngineFailed, ModelNotReady, Draining)
CLOSE_S = 5.0


class FlightPart(Enum):
    """A caller's role in a flight: the caller started the flight, waited for its end, or came after its end."""

    LED = "led"
    FOLLOWED = "followed"
    JOINED_AFTER_END = "came_late"  # the flight had ended, and its answer was being stored


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    """One run of a request and the callers that wait for it."""

    waiters: dict[asyncio.Future[bool], None] = field(default_factory=dict)  # in order of arrival
    task: asyncio.Task[None] | None = None
    is_finished: bool = False
    answer: T | None = None
    error: BaseException | None = None

    def finish(self) -> None:
        self.is_finished = True
        for waiter in self.waiters:
            _wake_waiter(waiter, True)


class Flights(Generic[T]):
    """Runs identical requests as one flight. Holds the current flights, by cache key.

    Each flight is a task, which continues when the caller that started it leaves, and is cancelled when nobody waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flights: dict[bytes, _Flight[T]] = {}
        self._tasks = BackgroundTasks("flights")
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._flights)

    async def share(self, key: bytes, deadline: float, run: Run[T], keep: Store[T]) -> tuple[T, FlightPart]:
        """Return the answer of the key's flight, and the caller's role in the flight. Start a flight if there is none.

        `run` gets the deadline of the caller that starts the flight; the other callers wait until their own deadlines.
        If a flight fails for a reason that does not concern other runs (its deadline, a worker's death), one of the
        waiting callers starts the next flight; no caller starts two. `keep` stores the answer after the waiting
        callers have received it; callers that come meanwhile receive the answer, too.
        """
        while True:
            if self._is_closed:
                raise Draining("this gateway is shutting down; send the request to another gateway")
            flight = self._flights.get(key)
            part = (
                FlightPart.LED
                if flight is None
                else FlightPart.JOINED_AFTER_END
                if flight.is_finished
                else FlightPart.FOLLOWED
            )
            if flight is None:
                flight = self._start_flight(key, deadline, run, keep)
            if part is not FlightPart.JOINED_AFTER_END:
                # The run enforces the starting caller's deadline, with a better error than a timer here.
                await self._wait(key, flight, None if part is FlightPart.LED else deadline)
            if flight.error is None:
                return cast(T, flight.answer), part
            if part is FlightPart.LED:
                raise flight.error
            if isinstance(flight.error, SHARED_ERRORS):
                # A copy for each caller, because raising an exception changes it.
                raise rebuild_error(flight.error.code, flight.error.message, flight.error.fields) from flight.error
            if self._clock() >= deadline:
                raise _make_deadline_error()

    async def close(self) -> None:
        self._is_closed = True
        await self._tasks.close(CLOSE_S)

    def _start_flight(self, key: bytes, deadline: float, run: Run[T], keep: Store[T]) -> _Flight[T]:
        flight: _Flight[T] = _Flight()
        self._flights[key] = flight
        flight.task = self._tasks.spawn(self._run_flight(key, flight, deadline, run, keep), has_caller=True)
        flight.task.add_done_callback(partial(self._flight_ended, key, flight))
        return flight

    async def _run_flight(self, key: bytes, flight: _Flight[T], deadline: float, run: Run[T], keep: Store[T]) -> None:
        answer = flight.answer = await run(deadline)
        flight.finish()
        await keep(answer)
        # Without a task switch in between, because from now on the store has the answer.
        self._remove(key, flight)

    async def _wait(self, key: bytes, flight: _Flight[T], deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        flight.waiters[waiter] = None
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            timer = loop.call_later(max(0.0, deadline - self._clock()), _wake_waiter, waiter, False)
        try:
            if not await waiter:
                raise _make_deadline_error()
        finally:
            if timer is not None:
                timer.cancel()
            del flight.waiters[waiter]
            if not flight.waiters and not flight.is_finished:
                self._abandon(key, flight)

    def _abandon(self, key: bytes, flight: _Flight[T]) -> None:
        # Removed first, so that no caller joins a flight that is about to end.
        self._remove(key, flight)
        assert flight.task is not None
        flight.task.cancel()

    def _flight_ended(self, key: bytes, flight: _Flight[T], task: asyncio.Task[None]) -> None:
        self._remove(key, flight)
        error = Cancelled("the run was cancelled") if task.cancelled() else task.exception()
        if not flight.is_finished:
            flight.error = error
            flight.finish()
        elif error is not None and not task.cancelled():
            log.error("cache_store_failed", error=str(error), exc_info=error)

    def _remove(self, key: bytes, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


def _wake_waiter(waiter: asyncio.Future[bool], is_finished: bool) -> None:
    if not waiter.done():
        waiter.set_result(is_finished)


def _make_deadline_error() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed while an identical request ran")
