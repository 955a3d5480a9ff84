"""Identical requests share one run, and one caller's end does not affect the others."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InvalidTensor,
    ModelNotReady,
    PenstockError,
    QueueFull,
    RequestTooLarge,
    WorkerLost,
)
from penstock.features.cache.flights import FlightPart, Flights

FAR_S = 60.0


class Runs:
    """Runs that end when the test releases them, each with its own outcome; further runs repeat the last."""

    def __init__(self, *outcomes: str | Exception) -> None:
        self.outcomes = list(outcomes or ["answer"])
        self.gate = asyncio.Event()
        self.deadlines: list[float] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.kept: list[str] = []
        self.keep_gate = asyncio.Event()
        self.keep_gate.set()

    async def run(self, deadline: float) -> str:
        self.deadlines.append(deadline)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def keep(self, answer: str) -> None:
        self.kept.append(answer)
        await self.keep_gate.wait()


class Callers:
    def __init__(self, flights: Flights[str], runs: Runs) -> None:
        self._flights = flights
        self._runs = runs

    def call(self, key: bytes = b"k", timeout_s: float = FAR_S) -> "asyncio.Task[tuple[str, FlightPart]]":
        deadline = time.monotonic() + timeout_s
        return asyncio.create_task(self._flights.share(key, deadline, self._runs.run, self._runs.keep))

    async def calls(self, count: int, **options: Any) -> "list[asyncio.Task[tuple[str, FlightPart]]]":
        tasks = [self.call(**options) for _ in range(count)]
        await settle()
        return tasks


async def settle() -> None:
    """Let everything run that is ready."""
    for _ in range(10):
        await asyncio.sleep(0)


async def gathered(tasks: "list[asyncio.Task[tuple[str, FlightPart]]]") -> list[Any]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def flights() -> AsyncIterator[Flights[str]]:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    opened: Flights[str] = Flights()
    yield opened
    await settle()
    gc.collect()
    await settle()
    assert complaints == []
    assert (len(opened), len(opened._tasks)) == (0, 0)


async def test_two_hundred_callers_wait_for_one_run(flights: Flights[str]) -> None:
    runs = Runs()
    tasks = await Callers(flights, runs).calls(200)
    assert len(flights) == 1
    runs.gate.set()
    answers = await gathered(tasks)
    assert [part for _, part in answers] == [FlightPart.LED] + [FlightPart.FOLLOWED] * 199
    assert {answer for answer, _ in answers} == {"answer"}
    assert (len(runs.deadlines), runs.kept) == (1, ["answer"])


async def test_different_requests_run_separately(flights: Flights[str]) -> None:
    runs = Runs()
    callers = Callers(flights, runs)
    tasks = [callers.call(b"a"), callers.call(b"b")]
    await settle()
    assert (len(flights), runs.most_running) == (2, 2)
    runs.gate.set()
    await gathered(tasks)


async def test_a_request_after_the_end_runs_again(flights: Flights[str]) -> None:
    runs = Runs()
    runs.gate.set()
    callers = Callers(flights, runs)
    await callers.call()
    await settle()
    assert await callers.call() == ("answer", FlightPart.LED)
    assert len(runs.deadlines) == 2


async def test_the_run_continues_when_its_leader_leaves(flights: Flights[str]) -> None:
    runs = Runs()
    leader, *others = await Callers(flights, runs).calls(3)
    leader.cancel()
    await settle()
    assert leader.cancelled()
    assert runs.running == 1
    runs.gate.set()
    assert await gathered(others) == [("answer", FlightPart.FOLLOWED)] * 2
    assert (len(runs.deadlines), runs.cancelled) == (1, 0)


async def test_the_run_is_cancelled_when_the_last_caller_leaves(flights: Flights[str]) -> None:
    runs = Runs()
    callers = Callers(flights, runs)
    tasks = await callers.calls(3)
    for task in tasks:
        assert runs.cancelled == 0
        task.cancel()
        await settle()
    assert (runs.running, runs.cancelled, len(flights)) == (0, 1, 0)


async def test_a_cancelled_run_is_not_joined(flights: Flights[str]) -> None:
    runs = Runs()
    callers = Callers(flights, runs)
    (alone,) = await callers.calls(1)
    alone.cancel()
    await asyncio.sleep(0)  # the caller left; its run has not ended yet
    late = callers.call()
    await settle()
    runs.gate.set()
    assert await late == ("answer", FlightPart.LED)
    assert (len(runs.deadlines), runs.cancelled) == (2, 1)


async def test_callers_of_a_run_that_is_cancelled_before_it_starts_are_woken(flights: Flights[str]) -> None:
    runs = Runs()
    task = Callers(flights, runs).call()
    await asyncio.sleep(0)  # its run was created and has not started
    await flights.close()
    (found,) = await gathered([task])
    assert isinstance(found, Cancelled)
    assert runs.deadlines == []


async def test_each_waiter_keeps_its_own_deadline(flights: Flights[str]) -> None:
    runs = Runs()
    callers = Callers(flights, runs)
    (leader,) = await callers.calls(1)
    hasty = callers.call(timeout_s=0.02)
    patient = callers.call()
    with pytest.raises(DeadlineExceeded, match="identical"):
        await asyncio.wait_for(hasty, 20)
    assert not leader.done()
    runs.gate.set()
    assert await gathered([leader, patient]) == [("answer", FlightPart.LED), ("answer", FlightPart.FOLLOWED)]
    assert len(runs.deadlines) == 1


async def test_a_caller_without_time_left_does_not_wait(flights: Flights[str]) -> None:
    runs = Runs()
    callers = Callers(flights, runs)
    (leader,) = await callers.calls(1)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(callers.call(timeout_s=-1.0), 20)
    runs.gate.set()
    await gathered([leader])


@pytest.mark.parametrize(
    "error",
    [
        InvalidTensor("x has no shape", input="x"),
        RequestTooLarge("too many tokens"),
        EngineFailed("the model raised"),
        ModelNotReady("it was unloaded"),
    ],
)
async def test_a_fault_of_the_request_is_raised_for_all_callers(flights: Flights[str], error: PenstockError) -> None:
    runs = Runs(error)
    tasks = await Callers(flights, runs).calls(50)
    runs.gate.set()
    found = await gathered(tasks)
    assert {(type(one), one.message, tuple(one.fields.items())) for one in found} == {
        (type(error), error.message, tuple(error.fields.items()))
    }
    assert len({id(one) for one in found}) == 50
    assert (len(runs.deadlines), runs.kept) == (1, [])


@pytest.mark.parametrize("error", [WorkerLost("died"), QueueFull("full"), Cancelled("gone"), ValueError("a bug")])
async def test_a_failure_of_the_leader_does_not_fail_the_others(flights: Flights[str], error: Exception) -> None:
    runs = Runs(error, "answer")
    tasks = await Callers(flights, runs).calls(50)
    runs.gate.set()
    first, *others = await gathered(tasks)
    assert first is error
    assert sorted(part.name for _, part in others) == ["FOLLOWED"] * 48 + ["LED"]
    assert others[0] == ("answer", FlightPart.LED)
    assert (len(runs.deadlines), runs.most_running, runs.kept) == (2, 1, ["answer"])


async def test_each_caller_leads_at_most_once_and_one_run_is_active_at_a_time(flights: Flights[str]) -> None:
    runs = Runs(QueueFull("full"))
    tasks = await Callers(flights, runs).calls(20)
    runs.gate.set()
    found = await gathered(tasks)
    assert all(isinstance(one, QueueFull) for one in found)
    assert (len(runs.deadlines), runs.most_running) == (20, 1)


async def test_the_next_run_has_its_own_leaders_deadline(flights: Flights[str]) -> None:
    runs = Runs(DeadlineExceeded("the leader's"), "answer")
    callers = Callers(flights, runs)
    leader = callers.call(timeout_s=1.0)
    patient = callers.call(timeout_s=50.0)
    await settle()
    runs.gate.set()
    first, second = await gathered([leader, patient])
    assert isinstance(first, DeadlineExceeded)
    assert second == ("answer", FlightPart.LED)
    assert runs.deadlines[1] - runs.deadlines[0] == pytest.approx(49.0, abs=1.0)


async def test_a_caller_past_its_deadline_does_not_start_a_run() -> None:
    now = 0.0
    flights: Flights[str] = Flights(lambda: now)
    runs = Runs(WorkerLost("died"), "answer")
    tasks = [asyncio.create_task(flights.share(b"k", 100.0, runs.run, runs.keep)) for _ in range(2)]
    await settle()
    now = 100.0
    runs.gate.set()
    leader, follower = await gathered(tasks)
    assert isinstance(leader, WorkerLost)
    assert isinstance(follower, DeadlineExceeded)
    assert len(runs.deadlines) == 1


async def test_a_caller_that_arrives_while_an_answer_is_stored_gets_it(flights: Flights[str]) -> None:
    runs = Runs()
    runs.gate.set()
    runs.keep_gate.clear()
    callers = Callers(flights, runs)
    assert await callers.call() == ("answer", FlightPart.LED)  # before it is stored
    assert await callers.call() == ("answer", FlightPart.JOINED_AFTER_END)
    runs.keep_gate.set()
    await settle()
    assert (len(flights), len(runs.deadlines)) == (0, 1)


async def test_an_answer_that_cannot_be_stored_is_still_returned(flights: Flights[str]) -> None:
    async def keep(answer: str) -> None:
        raise ValueError("a bug")

    runs = Runs()
    runs.gate.set()
    with capture_logs() as logs:
        assert await flights.share(b"k", time.monotonic() + FAR_S, runs.run, keep) == ("answer", FlightPart.LED)
        await settle()
    assert [entry["event"] for entry in logs] == ["cache_store_failed"]


async def test_closing_cancels_runs(flights: Flights[str]) -> None:
    runs = Runs()
    callers = Callers(flights, runs)
    leader, follower = await callers.calls(2)
    await flights.close()
    first, second = await gathered([leader, follower])
    assert isinstance(first, Cancelled)
    assert isinstance(second, Draining)
    assert (runs.cancelled, len(runs.deadlines)) == (1, 1)
    with pytest.raises(Draining):
        await callers.call()
