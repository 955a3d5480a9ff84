"""A thousand workers on a virtual clock: 80,000 jobs with the default policy, and 50,000 with each other one."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from random import Random
from statistics import fmean
from types import FrameType
from typing import Any

import pytest

from penstock.core.requests import InferRequest
from penstock.router.actions import Action, SendJob
from penstock.router.jobs import JobTable
from penstock.router.slots import Job, Offer
from tests.unit.router.tables import BLOCK, POLICIES, rules

REQUEST = InferRequest("m", [])
WORKERS = 1000
CREDITS = 16
SLOWNESS = 10.0


class Draws(Random):
    """Counts how often a policy draws: once per slot that it reads."""

    count = 0

    def random(self) -> float:
        self.count += 1
        return super().random()


class Simulation:
    """Each worker serves its jobs one after the other, each in a second on average."""

    def __init__(self, policy: str, slow: Iterable[int] = (), flapping: Iterable[int] = ()) -> None:
        self.draws = Draws(1)
        self.table = JobTable(self.draws.random, 1_000_000)
        self.table.declare_block(BLOCK, rules(policy, 1_000_000))
        self.names = [b"worker-%d" % n for n in range(WORKERS)]
        self.served = [0] * WORKERS
        self.deepest = 0  # the most jobs that a worker had at a time
        self.lost = 0
        self.places: dict[str, set[int]] = {}  # the workers of each key's jobs
        self._index = {name: n for n, name in enumerate(self.names)}
        self._load = Random(2)
        self._seconds = [1.0] * WORKERS
        for n in slow:
            self._seconds[n] = SLOWNESS
        self._flapping = list(flapping)
        self._down: set[int] = set()
        self._free_at = [0.0] * WORKERS
        self._ends: list[tuple[float, int, int, int]] = []

    def start(
        self, weight: Callable[[int], float] = lambda n: 1.0, distance: Callable[[int], int] = lambda n: 0
    ) -> None:
        self._offers = [
            Offer(BLOCK, CREDITS, name.decode(), weight(n), distance(n)) for n, name in enumerate(self.names)
        ]
        for name, offer in zip(self.names, self._offers, strict=True):
            self.table.join(name, [offer], 0.0)

    def run(self, jobs: int, rate: float, keys: int = 0) -> None:
        now = 0.0
        for number in range(jobs):
            now += self._load.expovariate(rate)
            while self._ends and self._ends[0][0] <= now:
                self._end()
            if self._flapping and number % 200 == 0:
                self._flap(now)
            job = Job(number, BLOCK, REQUEST, 1e9)
            if keys:
                job.key = f"k-{number % keys}"
            self._perform(self.table.submit(job, now), now)
        while self._ends:
            self._end()
        assert len(self.table) == 0
        assert sum(self.served) == jobs

    def _perform(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, SendJob):
                worker, job = self._index[action.worker], action.job
                assert job.slot is not None
                self.deepest = max(self.deepest, job.slot.in_flight)
                end = max(now, self._free_at[worker]) + self._load.expovariate(1.0) * self._seconds[worker]
                self._free_at[worker] = end
                heappush(self._ends, (end, job.job_id, worker, job.attempt))

    def _end(self) -> None:
        now, number, worker, attempt = heappop(self._ends)
        job, actions = self.table.complete(self.names[worker], number, attempt, now)
        if job is None:
            self.lost += 1  # its worker had left; the job ran or will run elsewhere
            return
        self.served[worker] += 1
        if job.key:
            self.places.setdefault(job.key, set()).add(worker)
        self._perform(actions, now)

    def _flap(self, now: float) -> None:
        worker = self._load.choice(self._flapping)
        self._free_at[worker] = now
        if worker in self._down:
            self._down.discard(worker)
            self._perform(self.table.join(self.names[worker], [self._offers[worker]], now), now)
        else:
            self._down.add(worker)
            self._perform(self.table.leave(self.names[worker], now), now)


def test_jobs_are_divided_evenly_and_each_decision_reads_two_workers() -> None:
    run = Simulation("power_of_two")
    run.start()
    run.run(80_000, rate=700.0)
    assert 50 < min(run.served) <= max(run.served) < 110
    assert run.deepest <= 8  # a randomly chosen worker would sometimes have more than 16
    assert run.draws.count == 160_000


def test_slow_and_flapping_workers_get_fewer_jobs_at_the_same_cost() -> None:
    slow, flapping = range(50), range(50, 100)
    run = Simulation("power_of_two", slow, flapping)
    run.start()
    run.run(80_000, rate=600.0)
    steady = run.served[100:]
    assert run.lost > 100
    assert fmean(run.served[n] for n in slow) < 0.3 * fmean(steady)
    assert max(steady) < 1.3 * fmean(steady)
    assert min(steady) > 0.7 * fmean(steady)
    assert run.draws.count <= 2 * (80_000 + run.lost)


def test_round_robin_gives_every_worker_the_same_number() -> None:
    run = Simulation("round_robin")
    run.start()
    run.run(50_000, rate=600.0)
    assert max(run.served) - min(run.served) <= 2


def test_random_gives_about_the_same_numbers_with_longer_queues() -> None:
    run, paired = Simulation("random"), Simulation("power_of_two")
    for each in (run, paired):
        each.start()
        each.run(50_000, rate=700.0)
    assert 20 < min(run.served) <= max(run.served) < 90
    assert paired.deepest < run.deepest


def test_least_connections_rarely_queues_two_jobs() -> None:
    run = Simulation("least_connections")
    run.start()
    run.run(50_000, rate=600.0)
    assert run.deepest <= 2


def test_least_latency_detects_slow_workers() -> None:
    run = Simulation("least_latency", slow=range(50))
    run.start()
    run.run(50_000, rate=600.0)
    assert fmean(run.served[:50]) < 0.3 * fmean(run.served[50:])


def test_weights_divide_the_jobs() -> None:
    run = Simulation("weighted")
    run.start(weight=lambda n: 1.0 + n % 4)
    run.run(50_000, rate=300.0)
    shares = [fmean(run.served[n] for n in range(WORKERS) if n % 4 == kind) for kind in range(4)]
    assert shares == pytest.approx([20.0, 40.0, 60.0, 80.0], rel=0.05)


def test_locality_prefers_near_workers_while_it_can() -> None:
    run = Simulation("locality")
    run.start(distance=lambda n: 0 if n < 100 else 1 + n % 2)
    run.run(50_000, rate=60.0)
    assert sum(run.served[:100]) == 50_000
    far = Simulation("locality")
    far.start(distance=lambda n: 0 if n < 100 else 1 + n % 2)
    far.run(50_000, rate=400.0)  # more than the near workers can take
    assert 0.15 < sum(far.served[:100]) / 50_000 < 0.6
    assert sum(far.served[n] for n in range(100, WORKERS) if n % 2) == 0  # no job was sent to the other zone


def test_each_key_stays_on_one_worker() -> None:
    run = Simulation("hash")
    run.start()
    run.run(50_000, rate=300.0, keys=10_000)
    assert len(run.places) == 10_000
    assert all(len(workers) == 1 for workers in run.places.values())
    assert len({worker for workers in run.places.values() for worker in workers}) > 900


def lines(policy: str, workers: int, jobs: int = 2000) -> float:
    """Return how many lines of the router one job executes, with twenty in flight."""
    table = JobTable(Random(workers).random)
    table.declare_block(BLOCK, rules(policy, 1000))
    for n in range(workers):
        table.join(b"%d" % n, [Offer(BLOCK, 4, f"worker-{n}", 1.0 + n % 3, n % 3)], 0.0)
    running: deque[tuple[bytes, int]] = deque()
    count = 0

    def turn(number: int) -> None:
        made = Job(number, BLOCK, REQUEST, 1e9, key=f"k-{number % 700}")
        actions = table.submit(made, float(number))
        if len(running) >= 20:
            worker, oldest = running.popleft()
            actions += table.complete(worker, oldest, 1, float(number))[1]
        running.extend((action.worker, action.job.job_id) for action in actions if isinstance(action, SendJob))

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if "router" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    for number in range(jobs):
        turn(number)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(jobs, 2 * jobs):
            turn(number)
    finally:
        sys.settrace(before)
    return count / jobs


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_executes_as_many_lines_with_a_thousand_workers_as_with_ten(policy: str) -> None:
    few, many = lines(policy, 10), lines(policy, 1000)
    assert many <= 1.1 * few, f"{few} lines with 10 workers, {many} with 1,000"
