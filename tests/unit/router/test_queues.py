"""Waiting jobs are sent by level and in order; a job that waits too long is refused or moved to the end."""

from random import Random

import pytest

from penstock.core.errors import DeadlineExceeded, ModelNotReady, QueueFull, QueueTimeout
from penstock.core.settings import BlockSettings, Priorities, QueuePolicy, Routing
from penstock.router.actions import FailJob
from penstock.router.jobs import JobTable
from penstock.router.queues import BlockRules
from penstock.router.slots import Job, Line
from tests.unit.router.tables import BLOCK, A, B, failed, job, join, levels, next_due, rules, sent, table

DELAY = QueuePolicy(on_timeout="delay", timeout_ms=1000)


def order(jobs: JobTable, running: int, now: float = 50.0) -> list[int]:
    """Return the order in which waiting jobs are sent to A, which has one credit, while its jobs end one by one."""
    found = []
    attempts = {running: jobs._jobs[running].attempt}
    while running in jobs._jobs:
        _, actions = jobs.complete(A, running, attempts[running], now)
        for _, number in sent(actions):
            running = number
            attempts[number] = jobs._jobs[number].attempt
            found.append(number)
    return found


def one_slot(priorities: Priorities, max_queue: int = 100) -> JobTable:
    """Return a table with a worker with one credit, which job 0 has."""
    made = table(rules(max_queue=max_queue, priorities=priorities))
    join(made, A, 1)
    made.submit(job(0, 1e9), 0.0)
    return made


def test_the_highest_level_is_served_first_and_each_level_in_order() -> None:
    jobs = one_slot(levels(3))
    for n, level in enumerate([3, 1, 2, 1, 3, 2], start=1):
        jobs.submit(job(n, priority=level), 0.0)
    assert order(jobs, 0) == [2, 4, 3, 6, 1, 5]


def test_a_level_can_have_its_own_limit() -> None:
    jobs = one_slot(levels(2, level_2=QueuePolicy(max_queue=2)), max_queue=4)
    for n in (1, 2):
        jobs.submit(job(n, priority=2), 0.0)
    with pytest.raises(QueueFull, match="priority 2"):
        jobs.submit(job(3, priority=2), 0.0)
    for n in (4, 5):
        jobs.submit(job(n, priority=1), 0.0)
    with pytest.raises(QueueFull, match="max_queue"):
        jobs.submit(job(6, priority=1), 0.0)
    assert order(jobs, 0) == [4, 5, 1, 2]
    jobs.submit(job(7, priority=2), 0.0)  # no job waits any more


def test_a_cancelled_job_makes_room_in_its_level() -> None:
    jobs = one_slot(levels(2, level_2=QueuePolicy(max_queue=1)))
    jobs.submit(job(1, priority=2), 0.0)
    jobs.cancel(1, 0.0)
    jobs.submit(job(2, priority=2), 0.0)
    assert jobs.count_jobs()[BLOCK][0] == 1


def test_a_lost_job_goes_to_the_front_of_its_level_only() -> None:
    jobs = table(rules(max_queue=100, priorities=levels(2)))
    join(jobs, A, 1)
    jobs.submit(job(1, priority=2), 0.0)
    jobs.submit(job(2, priority=2), 0.0)
    jobs.submit(job(3, priority=1), 0.0)
    jobs.leave(A, 1.0)
    join(jobs, A, 1, 2.0)
    assert order(jobs, 3) == [1, 2]


def test_a_job_that_waits_too_long_is_refused() -> None:
    jobs = one_slot(Priorities())
    jobs.submit(job(1, 1e9, queue_deadline=2.0), 0.0)
    jobs.submit(job(2, 1e9, queue_deadline=4.0), 0.0)
    assert next_due(jobs) == 2.0
    (action,) = jobs.tick(2.0)
    assert isinstance(action, FailJob)
    assert isinstance(action.error, QueueTimeout)
    assert "2.000 s" in action.error.message
    assert action.job.job_id == 1
    assert jobs.count_jobs()[BLOCK][0] == 1
    assert sent(jobs.complete(A, 0, 1, 3.0)[1]) == [(A, 2)]
    assert jobs.tick(5.0) == []  # running jobs left their queue in time


def test_a_job_that_waits_too_long_can_be_delayed_instead() -> None:
    jobs = one_slot(Priorities(queue=DELAY))
    for n in (1, 2):
        jobs.submit(job(n, 1e9, queue_deadline=1.0), 0.0)
    assert jobs.tick(1.0) == []
    assert jobs.count_jobs()[BLOCK][0] == 2
    assert next_due(jobs) == 1e9
    for n in (3, 4):
        jobs.submit(job(n, 1e9, queue_deadline=60.0), 2.0)
    assert order(jobs, 0) == [3, 4, 1, 2]


def test_delayed_jobs_are_queued_behind_the_lowest_level_in_order_of_levels() -> None:
    jobs = one_slot(Priorities(levels=3, by_level={1: DELAY, 2: DELAY}))
    jobs.submit(job(1, 1e9, priority=2, queue_deadline=1.0), 0.0)
    jobs.submit(job(2, 1e9, priority=1, queue_deadline=1.0), 0.0)
    jobs.tick(1.0)
    jobs.submit(job(3, 1e9, priority=3), 2.0)
    jobs.submit(job(4, 1e9, priority=1, queue_deadline=90.0), 2.0)
    assert order(jobs, 0) == [4, 3, 2, 1]


def test_a_delayed_job_fails_only_at_its_deadline() -> None:
    jobs = one_slot(Priorities(queue=DELAY))
    jobs.submit(job(1, 10.0, queue_deadline=1.0), 0.0)
    assert jobs.tick(9.0) == []
    (action,) = jobs.tick(10.0)
    assert isinstance(action, FailJob)
    assert isinstance(action.error, DeadlineExceeded)


def test_a_delayed_job_counts_in_its_level_and_can_be_cancelled() -> None:
    jobs = one_slot(Priorities(queue=QueuePolicy(on_timeout="delay", max_queue=2)))
    for n in (1, 2):
        jobs.submit(job(n, 1e9, queue_deadline=1.0), 0.0)
    jobs.tick(1.0)
    with pytest.raises(QueueFull):
        jobs.submit(job(3, 1e9), 2.0)
    jobs.cancel(1, 2.0)
    jobs.submit(job(4, 1e9), 2.0)
    assert order(jobs, 0) == [4, 2]


def test_a_job_that_was_handed_back_can_still_wait_too_long() -> None:
    jobs = table(rules(max_queue=100))
    join(jobs, A, 1)
    jobs.submit(job(1, 1e9, queue_deadline=2.0), 0.0)
    jobs.join(A, [], 1.0)
    jobs.hand_back(A, [1], 1.0)
    assert next_due(jobs) == 2.0
    assert failed(jobs.tick(2.0)) == [1]


def test_a_job_of_a_dead_worker_has_left_its_queue_in_time() -> None:
    jobs = table(rules(max_queue=100))
    join(jobs, A, 1)
    jobs.submit(job(1, 1e9), 0.0)
    jobs.submit(job(2, 1e9, queue_deadline=2.0), 0.0)
    jobs.complete(A, 1, 1, 1.0)
    jobs.leave(A, 1.5)
    assert jobs.tick(3.0) == []
    assert sent(join(jobs, B, 1, 4.0)) == [(B, 2)]


def test_levels_and_timeouts_apply_to_jobs_waiting_for_one_worker() -> None:
    jobs = table(rules("hash", 100, priorities=Priorities(levels=2, by_level={2: DELAY})))
    join(jobs, A, 1)
    jobs.submit(job(0, 1e9, key="x"), 0.0)
    jobs.submit(job(1, 1e9, key="x", priority=2, queue_deadline=1.0), 0.0)
    jobs.submit(job(2, 1e9, key="x", priority=2), 0.0)
    jobs.submit(job(3, 1e9, key="x", priority=1), 0.0)
    jobs.submit(job(4, 1e9, key="x", priority=1, queue_deadline=1.0), 0.0)
    jobs.submit(job(5, 1e9, priority=2), 0.5)
    assert failed(jobs.tick(1.0)) == [4]
    assert order(jobs, 0) == [3, 2, 5, 1]


def test_retiring_a_block_fails_the_jobs_in_all_its_queues() -> None:
    jobs = table(rules("hash", 100))
    jobs.submit(job(1, key="x"), 0.0)
    assert failed(jobs.retire_blocks({BLOCK: ModelNotReady("gone")})) == [1]
    join(jobs, A, 1)
    jobs.submit(job(2, key="x"), 0.0)
    jobs.submit(job(3, key="x"), 0.0)
    jobs.submit(job(4), 0.0)
    assert sorted(failed(jobs.join(A, [], 0.0))) == [3, 4]
    assert (len(jobs), jobs.count_jobs()[BLOCK][0], jobs.count_jobs()[BLOCK][1]) == (1, 0, 1)


def test_repeatedly_delayed_jobs_leave_nothing_behind() -> None:
    jobs = one_slot(Priorities(queue=DELAY), max_queue=10)
    for n in range(1, 3000):
        jobs.submit(job(n, 1e9, queue_deadline=float(n)), n - 1.0)
        jobs.tick(float(n))
        jobs.cancel(n, float(n))
    assert jobs._queues[BLOCK].line.entries <= 70
    assert len(jobs._queue_deadlines) <= 1010


def test_a_queue_keeps_its_order_when_jobs_leave() -> None:
    rng = Random(0)
    line = Line()
    inside: list[Job] = []
    for n in range(5000):
        event = rng.random()
        if event < 0.5:
            found = job(n, priority=rng.randint(1, 3))
            line.append(found)
            inside.append(found)
        elif event < 0.6:
            found = job(n, priority=rng.randint(1, 3))
            line.append(found, is_first=True)
            inside.insert(0, found)
        elif inside and event < 0.8:
            expected = min(inside, key=lambda one: one.priority)  # the first of them in the list
            assert line.pop() is expected
            inside.remove(expected)
        elif inside:
            found = rng.choice(inside)
            line.remove_waiting(found)
            inside.remove(found)
        assert line.length == len(inside)
    assert line.drain() == sorted(inside, key=lambda one: one.priority)
    assert (line.length, line.entries) == (0, 0)


def test_rules_come_from_the_model_unless_a_routing_is_configured() -> None:
    settings = BlockSettings.model_validate({"batching": {"max_queue": 7}, "routing": {"policy": "random"}})
    assert BlockRules.from_settings(settings) == BlockRules(7, Routing(policy="random"))
    assert BlockRules.from_settings(settings, Routing(policy="hash")).routing.policy == "hash"
