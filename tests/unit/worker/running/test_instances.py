"""The threads of a block's instances, with real threads."""

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

from penstock.worker.running.batcher import Batch, CloseReason
from penstock.worker.running.cores import Cores
from penstock.worker.running.instances import BatchOutcome, InstanceThreads

PATIENCE_S = 10.0


class Workshop:
    """Batches wait until they are released; a batch's number is its number of rows."""

    def __init__(self, count: int, cores: Cores | None = None) -> None:
        self.gates = [threading.Event() for _ in range(8)]
        self._started = [threading.Event() for _ in range(8)]
        self.ran: list[tuple[int, int]] = []  # the batch's number and the instance's
        self.said: list[str] = []  # of errands
        self._heard = asyncio.Event()
        self.threads = InstanceThreads("m", count, self._execute, self._ran, cores)
        self.ran_on: dict[int, set[int]] = {}  # by the batch's number

    def give(self, number: int) -> None:
        self.threads.run(Batch([], CloseReason.EMPTY, number, 1, 1))

    def run_errand(self) -> None:
        self.threads.run_errand(lambda instance: "a problem", self._hear)

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.gates[number].set()

    async def until_started(self, *numbers: int) -> None:
        for number in numbers:
            assert await asyncio.to_thread(self._started[number].wait, PATIENCE_S)

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
        self._started[batch.rows].set()
        self.gates[batch.rows].wait(PATIENCE_S)
        return BatchOutcome(instance, batch, [])

    def _hear(self, problem: str) -> None:
        self.said.append(problem)
        self._heard.set()

    def _ran(self, outcome: BatchOutcome) -> None:
        self.ran.append((outcome.batch.rows, outcome.instance))
        self._heard.set()


async def test_a_prefetched_batch_goes_to_the_first_idle_instance() -> None:
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


async def test_the_instance_that_was_busy_last_is_used_first() -> None:
    shop = Workshop(3)
    shop.let_go(*range(8))
    for number in range(8):
        shop.give(number)
        await shop.until(lambda: len(shop.ran) == number + 1)  # noqa: B023 - it has come true before the next
    assert len({instance for _, instance in shop.ran}) == 1
    await shop.close()


@pytest.mark.parametrize("is_busy", [True, False])
async def test_queued_work_is_done_before_closing(is_busy: bool) -> None:
    shop = Workshop(2)
    for number in range(2 if is_busy else 0):
        shop.give(number)
    shop.run_errand()
    await shop.close()
    assert shop.said == ["a problem"]
    assert len(shop.ran) == (2 if is_busy else 0)


async def test_many_errands_are_all_done_whatever_the_timing() -> None:
    """Given from the loop, at different moments of the threads' work."""
    shop = Workshop(2)
    for number in range(2000):
        shop.run_errand()
        if number % 3 == 0:
            await asyncio.sleep(0)
    await shop.until(lambda: len(shop.said) == 2000)
    await shop.close()


async def test_work_queued_just_before_closing_is_done_and_its_core_released(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores({number: {number} for number in (1022, 1023)})
    shop = Workshop(1, cores)
    look = shop.threads._pop_ahead

    def look_late() -> object:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        return look()

    shop.run_errand()
    time.sleep(0.05)  # noqa: ASYNC251 - it is done, and the loop has not heard of it
    monkeypatch.setattr(shop.threads, "_pop_ahead", look_late)
    shop.run_errand()
    await shop.close()
    await shop.until(lambda: len(shop.said) == 2)
    assert {cores.acquire(), cores.acquire()} == {1022, 1023}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_each_busy_instance_has_its_own_core_while_there_are_enough() -> None:
    everywhere = os.sched_getaffinity(0)
    first, second = sorted(everywhere)[:2]
    cores = Cores({number: {number} for number in (first, second)})
    shop, neighbour = Workshop(2, cores), Workshop(1, cores)
    for number in (0, 1, 2):
        shop.give(number)
    await shop.until_started(0, 1)
    neighbour.let_go(0)
    neighbour.give(0)
    await neighbour.until(lambda: len(neighbour.ran) == 1)
    assert neighbour.ran_on[0] == everywhere, "no core is left"
    shop.let_go(0, 2)
    await shop.until(lambda: len(shop.ran) == 2)
    assert [shop.ran_on[number] for number in (0, 1, 2)] == [{first}, {second}, {first}]
    neighbour.let_go(1)
    neighbour.give(1)
    await neighbour.until(lambda: len(neighbour.ran) == 2)
    assert neighbour.ran_on[1] == {first}, "the core is free again"
    await shop.close()
    await neighbour.close()
    assert os.sched_getaffinity(0) == everywhere


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_a_constantly_busy_instance_leaves_its_core_if_others_compute_there() -> None:
    everywhere = os.sched_getaffinity(0)
    first, second = sorted(everywhere)[:2]
    cores = Cores({number: {number} for number in (first, second)})
    shop = Workshop(1, cores)
    for number in (0, 1):
        shop.give(number)
    for _ in range(100):
        cores.record(1000, 100)
    shop.let_go(0)
    await shop.until(lambda: len(shop.ran) == 1)
    shop.give(2)
    shop.let_go(1, 2)
    await shop.until(lambda: len(shop.ran) == 3)
    assert (shop.ran_on[0], shop.ran_on[2]) == ({first}, everywhere)
    await shop.close()


async def test_a_core_that_was_taken_away_fails_no_batch() -> None:
    everywhere = os.sched_getaffinity(0)
    shop = Workshop(1, Cores({number: {number} for number in (1022, 1023)}))
    shop.let_go(0, 1)
    for number in (0, 1):
        shop.give(number)
    await shop.until(lambda: len(shop.ran) == 2)
    assert shop.ran_on == {0: everywhere, 1: everywhere}
    await shop.close()


async def test_threads_that_cannot_be_bound_run_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, mask: object) -> None:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    shop = Workshop(1, Cores({0: {0}, 1: {1}}))
    shop.let_go(0, 1)
    for number in (0, 1):
        shop.give(number)
    await shop.until(lambda: len(shop.ran) == 2)
    await shop.close()
