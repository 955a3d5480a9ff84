"""A job of a high level that has to wait takes one of a lower level back from its worker."""

from penstock.router.actions import Action, RecallFrom, Retry
from penstock.router.jobs import JobTable
from penstock.router.recalls import MAX_RECALLS
from tests.unit.router.tables import BLOCK, A, B, job, join, levels, rules, sent, table


def recalled(actions: list[Action]) -> list[tuple[bytes, int]]:
    return [(action.worker, action.job_id) for action in actions if isinstance(action, RecallFrom)]


def full(*priorities: int, credits: int = 0) -> JobTable:
    """Worker A has one of each of these."""
    jobs = table(rules(max_queue=100, priorities=levels(3)))
    join(jobs, A, credits or len(priorities), 0.0)
    for number, priority in enumerate(priorities, 1):
        assert sent(jobs.submit(job(number, priority=priority), 0.0)) == [(A, number)]
    return jobs


def test_what_was_sent_last_of_the_lowest_level_is_taken_back() -> None:
    jobs = full(3, 2, 3, 2)
    assert recalled(jobs.submit(job(9, priority=1), 1.0)) == [(A, 3)]
    actions = jobs.hand_back(A, [3], 1.0)
    assert [action.reason for action in actions if isinstance(action, Retry)] == ["recalled"]
    assert sent(actions) == [(A, 9)]


def test_each_that_waits_takes_one_back_and_only_from_below() -> None:
    jobs = full(2, 2, 1)
    assert recalled(jobs.submit(job(7, priority=2), 1.0)) == []
    assert [recalled(jobs.submit(job(n, priority=1), 1.0)) for n in (8, 9, 10)] == [[(A, 2)], [(A, 1)], []]


def test_who_has_started_it_keeps_it_and_the_credit_goes_to_the_highest_when_it_is_free() -> None:
    jobs = full(3)
    assert recalled(jobs.submit(job(8, priority=1), 1.0)) == [(A, 1)]
    jobs.submit(job(9, priority=2), 1.0)
    _, actions = jobs.complete(A, 1, 1, 2.0)
    assert sent(actions) == [(A, 8)]


def test_what_was_taken_back_is_the_first_of_its_level_and_costs_no_attempt() -> None:
    jobs = full(3, 3)
    jobs.submit(job(3, priority=3), 0.5)
    jobs.submit(job(9, priority=1), 1.0)
    assert sent(jobs.hand_back(A, [2], 1.0)) == [(A, 9)]
    _, actions = jobs.complete(A, 1, 1, 2.0)
    assert sent(actions) == [(A, 2)]


def test_a_job_is_taken_back_a_few_times_at_most() -> None:
    jobs = full(2)
    number = 10
    for _ in range(MAX_RECALLS):
        number += 1
        assert recalled(jobs.submit(job(number, priority=1), 1.0)) == [(A, 1)]
        assert sent(jobs.hand_back(A, [1], 1.0)) == [(A, number)]
        _, actions = jobs.complete(A, number, 1, 1.0)
        assert sent(actions) == [(A, 1)]
    assert recalled(jobs.submit(job(99, priority=1), 1.0)) == []


def test_jobs_of_sessions_stay_where_they_are() -> None:
    jobs = table(rules(priorities=levels(2)))
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1, priority=2, session="s"), 0.0)
    assert recalled(jobs.submit(job(2, priority=1), 1.0)) == []


def test_one_that_belongs_to_a_worker_takes_back_from_that_one() -> None:
    jobs = table(rules("hash", max_queue=9, priorities=levels(2)))
    join(jobs, A, 1, 0.0)
    join(jobs, B, 1, 0.0)
    keys = {jobs.owner(BLOCK, f"k{n}"): f"k{n}" for n in range(50)}
    jobs.submit(job(1, priority=2, key=keys[A]), 0.0)
    jobs.submit(job(2, priority=2, key=keys[B]), 0.0)
    assert recalled(jobs.submit(job(3, priority=1, key=keys[A]), 0.0)) == [(A, 1)]
    assert sent(jobs.hand_back(A, [1], 0.0)) == [(A, 3)]


def test_one_that_a_dead_worker_had_takes_back_too() -> None:
    jobs = full(3)
    join(jobs, B, 1, 0.0)
    jobs.submit(job(5, priority=1), 0.0)
    assert recalled(jobs.leave(B, 1.0)) == [(A, 1)]


def test_a_worker_that_takes_no_more_is_not_asked() -> None:
    jobs = full(3)
    jobs.join(A, [], 1.0)
    assert recalled(jobs.submit(job(5, priority=1), 1.0)) == []


def test_without_levels_nothing_is_taken_back() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1, priority=2), 0.0)
    assert recalled(jobs.submit(job(2, priority=1), 0.0)) == []
