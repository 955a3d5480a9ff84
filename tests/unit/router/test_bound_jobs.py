"""Jobs of a session whose state is on one worker: only that worker may run them."""

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


def test_a_job_waiting_for_a_worker_that_dies_fails() -> None:
    jobs = two()
    assert sent(jobs.submit(bound(1), 0.0)) == [(A, 1)]
    assert jobs.submit(bound(2), 0.0) == []
    found = jobs.leave(A, 1.0)
    assert sorted(failed(found)) == [1, 2]
    assert sent(found) == []
    assert all(isinstance(action.error, WorkerLost) for action in found if isinstance(action, FailJob))


def test_a_job_for_a_lost_worker_is_refused() -> None:
    jobs = two()
    jobs.leave(A, 1.0)
    with pytest.raises(WorkerLost, match="the request was not run"):
        jobs.submit(bound(1), 1.0)
    assert sent(jobs.submit(job(2, session="s-1"), 1.0)) == [(B, 2)]  # a job that restarts the session


def test_a_job_that_is_handed_back_waits_for_its_worker_and_fails_when_it_leaves() -> None:
    jobs = two()
    jobs.submit(bound(1), 0.0)
    join(jobs, A, 0)  # it is leaving, and takes no more
    assert failed(jobs.hand_back(A, [1], 1.0)) == [1]
    again = two()
    again.submit(bound(1), 0.0)
    assert sent(again.hand_back(A, [1], 1.0)) == [(A, 1)]
    assert failed(again.leave(A, 2.0)) == [1]


def test_a_job_waiting_for_an_ejected_worker_fails() -> None:
    jobs = two(health=Health(failures=1))
    jobs.submit(bound(1), 0.0)
    jobs.submit(bound(2), 0.0)
    _, found = jobs.complete(A, 1, 1, 1.0, "engine_failed", "it broke")
    assert failed(found) == [2]
    assert sent(found) == []


def test_unbound_jobs_of_a_dead_worker_move_to_another() -> None:
    jobs = two()
    jobs.submit(bound(1), 0.0)
    jobs.submit(job(2, session="s-1", home=A), 0.0)
    found = jobs.leave(A, 1.0)
    assert failed(found) == [1]
    assert sent(found) == [(B, 2)]
