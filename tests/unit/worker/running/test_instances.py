"""The threads of a block's instances: who is handed what, in real threads."""

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

from penstock.worker.running.batcher import Batch, Closed
from penstock.worker.running.cores import Cores
from penstock.worker.running.instances import BatchOutcome, InstanceThreads

PATIENCE_S = 10.0


class Workshop:
    """Batches are held up until they are let go; each one's number is how many rows it has."""

    def __init__(self, count: int, cores: Cores | None = None) -> None:
        self.gates = [threading.Event() for _ in range(8)]
        self.ran: list[tuple[int, int]] = []  # the batch's number and the instance's
        self.said: list[str] = []  # of errands
        self._heard = asyncio.Event()
        self.threads = InstanceThreads("m", count, self._execute, self._ran, cores)
        self.ran_on: dict[int, set[int]] = {}  # by the batch's number

    def give(self, number: int) -> None:
        self.threads.run(Batch([], Closed.EMPTY, number, 1, 1))

    def ask(self) -> None:
        self.threads.ask(lambda instance: "a problem", self._hear)

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.gates[number].set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    async def close(self) -> None:
        self.let_go(*range(len(self.gates)))
        await asyncio.wait_for(self.threads.close(lambda: None).wait(), PATIENCE_S)

    def _execute(self, instance: int, batch: Batch) -> BatchOutcome:
        self.ran_on[batch.rows] = os.sched_getaffinity(0)
        assert self.gates[batch.rows].wait(PATIENCE_S)
        return BatchOutcome(instance, batch, [])

    def _hear(self, problem: str) -> None:
        self.said.append(problem)
        self._heard.set()

    def _ran(self, outcome: BatchOutcome) -> None:
        self.ran.append((outcome.batch.rows, outcome.instance))
        self._heard.set()


async def test_one_ahead_goes_to_whoever_is_done_first() -> None:
    shop = Workshop(2)
    for number in (0, 1, 2):
        shop.give(number)
    shop.let_go(1, 2)
    await shop.until(lambda: len(shop.ran) == 2)
    assert [number for number, _ in shop.ran] == [1, 2]
    assert shop.ran[0][1] == shop.ran[1][1]
    shop.let_go(0)
    await shop.until(lambda: len(shop.ran) == 3)
    assert shop.ran[2][1] != shop.ran[0][1]
    await shop.close()


async def test_who_was_busy_last_is_first() -> None:
    shop = Workshop(3)
    shop.let_go(*range(8))
    for number in range(8):
        shop.give(number)
        await shop.until(lambda: len(shop.ran) == number + 1)  # noqa: B023 - it has come true before the next
    assert len({instance for _, instance in shop.ran}) == 1
    await shop.close()


@pytest.mark.parametrize("is_busy", [True, False])
async def test_what_was_given_is_done_before_the_end(is_busy: bool) -> None:
    shop = Workshop(2)
    for number in range(2 if is_busy else 0):
        shop.give(number)
    shop.ask()
    await shop.close()
    assert shop.said == ["a problem"]
    assert len(shop.ran) == (2 if is_busy else 0)


async def test_many_errands_are_all_done_whenever_threads_look() -> None:
    """Given from the loop, each at another moment of what the threads do."""
    shop = Workshop(2)
    for number in range(2000):
        shop.ask()
        if number % 3 == 0:
            await asyncio.sleep(0)
    await shop.until(lambda: len(shop.said) == 2000)
    await shop.close()


async def test_what_came_just_before_the_end_is_done_and_its_core_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores({number: {number} for number in (1022, 1023)})
    shop = Workshop(1, cores)
    look = shop.threads._take_ahead

    def look_late() -> object:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        return look()

    shop.ask()
    time.sleep(0.05)  # noqa: ASYNC251 - it is done, and the loop has not heard of it
    monkeypatch.setattr(shop.threads, "_take_ahead", look_late)
    shop.ask()
    await shop.close()
    await shop.until(lambda: len(shop.said) == 2)
    assert {cores.take(), cores.take()} == {1022, 1023}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_each_busy_instance_has_a_core_of_its_own_while_there_are_enough() -> None:
    everywhere = os.sched_getaffinity(0)
    first, second = sorted(everywhere)[:2]
    cores = Cores({number: {number} for number in (first, second)})
    shop, neighbour = Workshop(2, cores), Workshop(1, cores)
    for number in (0, 1, 2):
        shop.give(number)
    neighbour.let_go(0)
    neighbour.give(0)
    await neighbour.until(lambda: len(neighbour.ran) == 1)
    assert neighbour.ran_on[0] == everywhere, "all cores are taken"
    shop.let_go(0, 2)
    await shop.until(lambda: len(shop.ran) == 2)
    assert [shop.ran_on[number] for number in (0, 1, 2)] == [{first}, {second}, {first}]
    neighbour.let_go(1)
    neighbour.give(1)
    await neighbour.until(lambda: len(neighbour.ran) == 2)
    assert neighbour.ran_on[1] == {first}, "it was given back"
    await shop.close()
    await neighbour.close()
    assert os.sched_getaffinity(0) == everywhere


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_one_that_is_never_idle_leaves_its_core_where_others_compute_there() -> None:
    everywhere = os.sched_getaffinity(0)
    first, second = sorted(everywhere)[:2]
    cores = Cores({number: {number} for number in (first, second)})
    shop = Workshop(1, cores)
    for number in (0, 1):
        shop.give(number)
    for _ in range(100):
        cores.note(1000, 100)
    shop.let_go(0)
    await shop.until(lambda: len(shop.ran) == 1)
    shop.give(2)
    shop.let_go(1, 2)
    await shop.until(lambda: len(shop.ran) == 3)
    assert (shop.ran_on[0], shop.ran_on[2]) == ({first}, everywhere)
    await shop.close()


async def test_a_core_that_was_taken_away_fails_nobody() -> None:
    everywhere = os.sched_getaffinity(0)
    shop = Workshop(1, Cores({number: {number} for number in (1022, 1023)}))
    shop.let_go(0, 1)
    for number in (0, 1):
        shop.give(number)
    await shop.until(lambda: len(shop.ran) == 2)
    assert shop.ran_on == {0: everywhere, 1: everywhere}
    await shop.close()


async def test_where_threads_may_not_be_bound_they_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, mask: object) -> None:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    shop = Workshop(1, Cores({0: {0}, 1: {1}}))
    shop.let_go(0, 1)
    for number in (0, 1):
        shop.give(number)
    await shop.until(lambda: len(shop.ran) == 2)
    await shop.close()
