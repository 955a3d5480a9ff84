"""Jobs of a session whose state one worker has: that worker runs them, or nobody does."""

import pytest

from penstock.core.errors import WorkerLost
from penstock.core.settings import Health
from penstock.router.actions import FailJob
from penstock.router.jobs import JobTable
from penstock.router.slots import Job
from tests.unit.router.tables import A, B, failed, job, join, rules, sent, table


def bound(job_id: int, home: bytes = A) -> Job:
    made = job(job_id, is_idempotent=False, session="s-1", home=home)
    made.is_bound = True
    return made


def two(credits: int = 1, health: Health | None = None) -> JobTable:
    jobs = table(rules(max_queue=100, health=health))
    join(jobs, A, credits)
    join(jobs, B, credits)
    return jobs


def test_one_that_waits_for_a_worker_that_dies_fails_and_runs_nowhere() -> None:
    jobs = two()
    assert sent(jobs.submit(bound(1), 0.0)) == [(A, 1)]
    assert jobs.submit(bound(2), 0.0) == []
    found = jobs.leave(A, 1.0)
    assert sorted(failed(found)) == [1, 2]
    assert sent(found) == []
    assert all(isinstance(action.error, WorkerLost) for action in found if isinstance(action, FailJob))


def test_one_that_comes_when_its_worker_is_gone_is_refused() -> None:
    jobs = two()
    jobs.leave(A, 1.0)
    with pytest.raises(WorkerLost, match="nothing was run"):
        jobs.submit(bound(1), 1.0)
    assert sent(jobs.submit(job(2, session="s-1"), 1.0)) == [(B, 2)]  # one that starts anew


def test_one_that_is_handed_back_waits_for_its_worker_and_fails_when_that_leaves() -> None:
    jobs = two()
    jobs.submit(bound(1), 0.0)
    join(jobs, A, 0)  # it leaves, and takes no more
    assert failed(jobs.hand_back(A, [1], 1.0)) == [1]
    again = two()
    again.submit(bound(1), 0.0)
    assert sent(again.hand_back(A, [1], 1.0)) == [(A, 1)]
    assert failed(again.leave(A, 2.0)) == [1]


def test_one_that_waits_for_a_worker_that_is_ejected_fails() -> None:
    jobs = two(health=Health(failures=1))
    jobs.submit(bound(1), 0.0)
    jobs.submit(bound(2), 0.0)
    _, found = jobs.complete(A, 1, 1, 1.0, "engine_failed", "it broke")
    assert failed(found) == [2]
    assert sent(found) == []


def test_others_of_the_dead_worker_go_elsewhere() -> None:
    jobs = two()
    jobs.submit(bound(1), 0.0)
    jobs.submit(job(2, session="s-1", home=A), 0.0)
    found = jobs.leave(A, 1.0)
    assert failed(found) == [1]
    assert sent(found) == [(B, 2)]
