"""Supervised loops and one-off tasks, by a clock that only their pauses move."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from penstock.telemetry.background import (
    FAILING_S,
    RETRY_S,
    BackgroundTasks,
    _get_metrics,
    describe_failing_loop,
    list_supervised_loops,
)


class Clock:
    def __init__(self, pauses: int) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.over = asyncio.Event()
        self._most = pauses

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now += pause_s
        if len(self.pauses) == self._most:
            self.over.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


async def run(
    steps: Sequence[Exception | None], every: float | Callable[[], float] = 1.0, name: str = "a loop"
) -> tuple[Clock, list[dict[str, object]], str]:
    """Run one pass for each step; return the clock, what was logged, and why the process is not ready at the end."""
    clock = Clock(len(steps))
    left = iter(steps)

    async def run_pass() -> None:
        if (error := next(left)) is not None:
            raise error

    tasks = BackgroundTasks("test", clock=lambda: clock.now, sleep=clock.sleep)
    with capture_logs() as logs:
        tasks.supervise(name, run_pass, every)
        await clock.over.wait()
        problem = describe_failing_loop()
        await tasks.close()
    assert not list_supervised_loops()
    return clock, [dict(entry) for entry in logs], problem


async def test_a_loop_continues_after_an_exception() -> None:
    clock, _, _ = await run([None, OSError("lost"), None, None])
    assert clock.pauses == [1.0, 1.0, 1.0, 1.0]


async def test_an_exception_is_logged_once_per_kind_and_again_after_recovery() -> None:
    steps: list[Exception | None] = [
        OSError("1"),
        OSError("2"),
        ValueError("3"),
        ValueError("4"),
        None,
        ValueError("5"),
    ]
    _, logs, _ = await run(steps)
    assert [(entry["event"], str(entry.get("exc_info", ""))) for entry in logs] == [
        ("background_loop_failed", "1"),
        ("background_loop_failed", "3"),
        ("background_loop_recovered", ""),
        ("background_loop_failed", "5"),
    ]


async def test_every_failure_is_counted_under_the_name_of_the_loop() -> None:
    counter = _get_metrics().failures.labels("counted")
    before = counter._value.get()
    await run([OSError(), OSError(), None], name="counted")
    assert counter._value.get() - before == 2


async def test_a_loop_that_keeps_failing_makes_its_process_unready_until_a_pass_succeeds() -> None:
    failures = [OSError()] * 6
    assert "'a loop' keeps failing" in (await run(failures))[2]
    assert (await run([*failures, None]))[2] == ""


async def test_a_few_failures_or_a_short_time_of_failing_change_no_readiness() -> None:
    assert (await run([OSError()] * 2, every=FAILING_S + 1))[2] == ""
    assert (await run([OSError()] * 50, every=0.01))[2] == ""


async def test_a_pass_that_runs_for_long_counts_as_working() -> None:
    clock = Clock(100)
    is_up = asyncio.Event()

    async def connect() -> None:
        if len(clock.pauses) < 20:
            raise OSError
        is_up.set()
        await asyncio.Event().wait()

    tasks = BackgroundTasks("test", clock=lambda: clock.now, sleep=clock.sleep)
    tasks.supervise("connection", connect, deadline_s=None)
    await is_up.wait()
    assert describe_failing_loop()
    clock.now += FAILING_S
    assert not describe_failing_loop()
    await tasks.close()


async def test_a_failed_pass_of_a_loop_without_a_period_is_followed_by_a_pause() -> None:
    assert (await run([None, OSError(), None], every=0.0))[0].pauses == [0.0, RETRY_S, 0.0]


async def test_a_period_can_be_computed_after_each_pass() -> None:
    periods = iter([3.0, 5.0])
    clock, _, _ = await run([None, OSError(), None], every=lambda: next(periods))
    assert clock.pauses == [3.0, RETRY_S, 5.0]


async def test_a_pass_beyond_its_deadline_fails() -> None:
    clock = Clock(2)
    tasks = BackgroundTasks("test", clock=lambda: clock.now, sleep=clock.sleep)
    with capture_logs() as logs:
        tasks.supervise("slow", asyncio.Event().wait, deadline_s=0.001)
        await clock.over.wait()
        await tasks.close()
    assert [(entry["loop"], type(entry["exc_info"])) for entry in logs] == [("slow", TimeoutError)]


async def test_a_pass_may_be_a_plain_function() -> None:
    clock, calls = Clock(3), list[float]()
    tasks = BackgroundTasks("test", clock=lambda: clock.now, sleep=clock.sleep)
    tasks.supervise("ticks", lambda: calls.append(clock.now), every=2.0)
    await clock.over.wait()
    assert calls == [0.0, 2.0, 4.0]
    assert [loop.name for loop in list_supervised_loops()] == ["ticks"]
    await tasks.close()


async def test_cancellation_ends_a_loop() -> None:
    tasks = BackgroundTasks("test")
    loop = tasks.supervise("cancelled", asyncio.Event().wait, deadline_s=None)
    await asyncio.sleep(0)
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
    assert not list_supervised_loops()


async def test_a_failed_one_off_task_is_logged_and_reported() -> None:
    failures: list[BaseException] = []
    tasks = BackgroundTasks("test", failures.append)
    error = OSError("lost")

    async def fail() -> None:
        raise error

    with capture_logs() as logs:
        task = tasks.spawn(fail())
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert failures == [error]
    assert [entry["event"] for entry in logs] == ["test_task_failed"]
    assert not len(tasks)


async def test_closing_waits_until_every_task_has_cleaned_up() -> None:
    ended = asyncio.Event()

    async def clean_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    tasks = BackgroundTasks("test")
    tasks.spawn(clean_up())
    await asyncio.sleep(0)
    await tasks.close()
    assert ended.is_set()


async def test_the_failure_of_a_task_with_a_caller_reaches_only_the_caller() -> None:
    async def fail() -> None:
        raise OSError("lost")

    failures: list[BaseException] = []
    tasks = BackgroundTasks("store", failures.append)
    with capture_logs() as logs:
        with pytest.raises(OSError, match="lost"):
            await tasks.spawn(fail(), has_caller=True)
        await tasks.close()
    assert (logs, failures, len(tasks)) == ([], [], 0)


async def test_waiting_ends_after_its_time_although_a_task_still_runs() -> None:
    tasks = BackgroundTasks("store")
    never = tasks.spawn(asyncio.Event().wait())
    await tasks.wait(0.0)
    assert not never.done()
    await tasks.close()
    assert never.cancelled()
