"""Policies switched while jobs run and wait: no job is lost, and the new policy applies at once."""

from collections import Counter
from random import Random

import pytest

from penstock.core.settings import Priorities
from penstock.router.actions import Action, SendJob
from penstock.router.jobs import JobTable
from tests.unit.router.tables import BLOCK, POLICIES, A, B, C, job, join, levels, next_due, rules, sent, table


def switch(jobs: JobTable, policy: str, now: float, max_queue: int = 100) -> list[Action]:
    jobs.declare_block(BLOCK, rules(policy, max_queue))
    return jobs.tick(now)


def test_equal_rules_change_nothing() -> None:
    jobs = table(rules(max_queue=100))
    before = jobs._queues[BLOCK].policy
    jobs.declare_block(BLOCK, rules(max_queue=100))
    assert jobs._queues[BLOCK].policy is before
    assert next_due(jobs) is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", POLICIES)
def test_every_policy_can_follow_every_other(before: str, policy: str) -> None:
    jobs = table(rules(before, 100))
    for worker in (A, B, C):
        join(jobs, worker, 2)
    running = [found for n in range(9) for found in sent(jobs.submit(job(n, key=f"k-{n}"), 0.0))]
    jobs.declare_block(BLOCK, rules(policy, 100))
    assert next_due(jobs) == (100.0 if policy == before else 0.0)
    running += sent(jobs.tick(1.0))
    ended = set()
    while running:
        worker, number = running.pop(0)
        done, actions = jobs.complete(worker, number, 1, 2.0)
        assert done is not None
        ended.add(number)
        running += sent(actions)
    assert ended == set(range(9))
    assert len(jobs) == 0


def test_jobs_waiting_for_one_worker_are_sent_anywhere_after_the_switch() -> None:
    jobs = table(rules("hash", 100))
    for worker in (A, B, C):
        join(jobs, worker, 1)
    home = jobs.find_owner(BLOCK, "x")
    for n in range(3):
        jobs.submit(job(n, key="x"), float(n))
    assert jobs.count_jobs()[BLOCK][0] == 2
    started = sent(switch(jobs, "least_connections", 3.0))
    assert {worker for worker, _ in started} == {A, B, C} - {home}
    assert [number for _, number in started] == [1, 2]


def test_jobs_waiting_for_any_worker_are_sent_to_their_owner_after_the_switch() -> None:
    jobs = table(rules("random", 1000))
    join(jobs, A, 1)
    join(jobs, B, 1)
    for n in range(200):
        jobs.submit(job(n, key=f"k-{n}"), 0.0)
    switch(jobs, "hash", 1.0, 1000)
    running = [(A, n) for n in jobs._queues[BLOCK].slots[A].jobs] + [(B, n) for n in jobs._queues[BLOCK].slots[B].jobs]
    for worker, first in running:
        _, actions = jobs.complete(worker, first, 1, 2.0)
        while started := sent(actions):
            ((taker, number),) = started
            assert taker == worker == jobs.find_owner(BLOCK, f"k-{number}")
            _, actions = jobs.complete(taker, number, 1, 3.0)
    assert len(jobs) == 0


def test_a_session_stays_on_its_worker_through_a_switch() -> None:
    jobs = table(rules("power_of_two", 100))
    for worker in (A, B, C):
        join(jobs, worker, 1)
    home = jobs.find_owner(BLOCK, "s")
    assert home is not None
    for n in range(3):
        jobs.submit(job(n, session="s"), 0.0)
    for policy in POLICIES:
        assert switch(jobs, policy, 1.0) == []
    assert jobs.list_slot_states(BLOCK, 1.0)[[A, B, C].index(home)].waiting == 2


def test_turns_restart_with_each_switch_to_weighted() -> None:
    jobs = table(rules("weighted", 100))
    join(jobs, A, 10)
    for n in range(300):
        jobs.submit(job(n), 0.0)
        jobs.complete(A, n, 1, 0.0)
    switch(jobs, "random", 1.0)
    switch(jobs, "weighted", 1.0)
    join(jobs, B, 10)
    takers: Counter[bytes] = Counter()
    for n in range(300, 400):
        ((worker, number),) = sent(jobs.submit(job(n), 1.0))
        takers[worker] += 1
        jobs.complete(worker, number, 1, 1.0)
    assert takers[A] == pytest.approx(50, abs=1)


def test_changed_levels_apply_to_new_jobs_and_keep_waiting_ones() -> None:
    jobs = table(rules(max_queue=100, priorities=levels(3)))
    join(jobs, A, 1)
    for n in range(4):
        jobs.submit(job(n, priority=max(1, n)), 0.0)
    jobs.declare_block(BLOCK, rules(max_queue=100, priorities=Priorities()))
    jobs.submit(job(4), 1.0)
    running, found = 0, []
    while actions := sent(jobs.complete(A, running, 1, 2.0)[1]):
        ((_, running),) = actions
        found.append(running)
    assert found == [1, 4, 2, 3]


def test_switching_under_load_loses_no_job() -> None:
    """Ten thousand jobs, a switch every hundred events, joining and leaving workers: each job ends once."""
    rng = Random(11)
    jobs = table(rules(max_queue=100_000), max_attempts=10_000)
    running: dict[int, tuple[bytes, int]] = {}
    ended: Counter[int] = Counter()
    up: set[bytes] = set()

    def take(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendJob):
                running[action.job.job_id] = (action.worker, action.job.attempt)

    def end_one() -> None:
        number = rng.choice(list(running))
        worker, attempt = running.pop(number)
        done, actions = jobs.complete(worker, number, attempt, now)
        assert done is not None
        ended[number] += 1
        take(actions)

    now, submitted = 0.0, 0
    while submitted < 10_000:
        now += 1.0
        if now % 100 == 0:
            jobs.declare_block(BLOCK, rules(rng.choice(POLICIES), 100_000))
        take(jobs.tick(now))
        event, worker = rng.random(), b"worker-%d" % rng.randrange(12)
        if event < 0.5 or not running:
            session = f"s-{rng.randrange(50)}" if rng.random() < 0.2 else ""
            take(jobs.submit(job(submitted, 1e9, key=f"k-{rng.randrange(300)}", session=session), now))
            submitted += 1
        elif event < 0.98:
            end_one()
        elif worker in up:
            up.discard(worker)
            for number in [number for number, (who, _) in running.items() if who == worker]:
                del running[number]
            take(jobs.leave(worker, now))
        else:
            up.add(worker)
            take(join(jobs, worker, rng.randint(1, 6), now, weight=rng.randint(1, 4), distance=rng.randrange(3)))
    for n in range(12):
        take(join(jobs, b"worker-%d" % n, 6, now))
    while running:
        end_one()
    assert len(jobs) == 0
    assert set(ended) == set(range(10_000))
    assert set(ended.values()) == {1}
