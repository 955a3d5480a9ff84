"""A waiting job of a high level takes a job of a lower level back from its worker."""

from penstock.router.actions import Action, CountRetry, RecallJob
from penstock.router.jobs import JobTable
from penstock.router.queues import MAX_RECALLS
from tests.unit.router.tables import BLOCK, A, B, job, join, levels, rules, sent, table


def recalled(actions: list[Action]) -> list[tuple[bytes, int]]:
    return [(action.worker, action.job_id) for action in actions if isinstance(action, RecallJob)]


def full(*priorities: int, credits: int = 0) -> JobTable:
    """Worker A has one job of each of these levels."""
    jobs = table(rules(max_queue=100, priorities=levels(3)))
    join(jobs, A, credits or len(priorities), 0.0)
    for number, priority in enumerate(priorities, 1):
        assert sent(jobs.submit(job(number, priority=priority), 0.0)) == [(A, number)]
    return jobs


def test_the_last_sent_job_of_the_lowest_level_is_recalled() -> None:
    jobs = full(3, 2, 3, 2)
    assert recalled(jobs.submit(job(9, priority=1), 1.0)) == [(A, 3)]
    actions = jobs.hand_back(A, [3], 1.0)
    assert [action.reason for action in actions if isinstance(action, CountRetry)] == ["recalled"]
    assert sent(actions) == [(A, 9)]


def test_each_waiting_job_recalls_one_job_of_a_lower_level() -> None:
    jobs = full(2, 2, 1)
    assert recalled(jobs.submit(job(7, priority=2), 1.0)) == []
    assert [recalled(jobs.submit(job(n, priority=1), 1.0)) for n in (8, 9, 10)] == [[(A, 2)], [(A, 1)], []]


def test_a_started_job_is_kept_and_its_credit_goes_to_the_highest_waiting_job() -> None:
    jobs = full(3)
    assert recalled(jobs.submit(job(8, priority=1), 1.0)) == [(A, 1)]
    jobs.submit(job(9, priority=2), 1.0)
    _, actions = jobs.complete(A, 1, 1, 2.0)
    assert sent(actions) == [(A, 8)]


def test_a_recalled_job_is_the_first_of_its_level_and_uses_no_attempt() -> None:
    jobs = full(3, 3)
    jobs.submit(job(3, priority=3), 0.5)
    jobs.submit(job(9, priority=1), 1.0)
    assert sent(jobs.hand_back(A, [2], 1.0)) == [(A, 9)]
    _, actions = jobs.complete(A, 1, 1, 2.0)
    assert sent(actions) == [(A, 2)]


def test_a_job_is_recalled_a_few_times_at_most() -> None:
    jobs = full(2)
    number = 10
    for _ in range(MAX_RECALLS):
        number += 1
        assert recalled(jobs.submit(job(number, priority=1), 1.0)) == [(A, 1)]
        assert sent(jobs.hand_back(A, [1], 1.0)) == [(A, number)]
        _, actions = jobs.complete(A, number, 1, 1.0)
        assert sent(actions) == [(A, 1)]
    assert recalled(jobs.submit(job(99, priority=1), 1.0)) == []


def test_jobs_of_sessions_are_not_recalled() -> None:
    jobs = table(rules(priorities=levels(2)))
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1, priority=2, session="s"), 0.0)
    assert recalled(jobs.submit(job(2, priority=1), 1.0)) == []


def test_a_job_bound_to_a_worker_recalls_from_that_worker() -> None:
    jobs = table(rules("hash", max_queue=9, priorities=levels(2)))
    join(jobs, A, 1, 0.0)
    join(jobs, B, 1, 0.0)
    keys = {jobs.find_owner(BLOCK, f"k{n}"): f"k{n}" for n in range(50)}
    jobs.submit(job(1, priority=2, key=keys[A]), 0.0)
    jobs.submit(job(2, priority=2, key=keys[B]), 0.0)
    assert recalled(jobs.submit(job(3, priority=1, key=keys[A]), 0.0)) == [(A, 1)]
    assert sent(jobs.hand_back(A, [1], 0.0)) == [(A, 3)]


def test_a_job_of_a_dead_worker_recalls_too() -> None:
    jobs = full(3)
    join(jobs, B, 1, 0.0)
    jobs.submit(job(5, priority=1), 0.0)
    assert recalled(jobs.leave(B, 1.0)) == [(A, 1)]


def test_a_worker_that_takes_no_more_jobs_is_not_asked() -> None:
    jobs = full(3)
    jobs.join(A, [], 1.0)
    assert recalled(jobs.submit(job(5, priority=1), 1.0)) == []


def test_without_levels_nothing_is_recalled() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1, priority=2), 0.0)
    assert recalled(jobs.submit(job(2, priority=1), 0.0)) == []
