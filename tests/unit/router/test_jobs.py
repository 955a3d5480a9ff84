"""The job table: the same events always give the same actions."""

from random import Random

import pytest

from penstock.core.errors import DeadlineExceeded, ModelNotReady, QueueFull, WorkerLost
from penstock.core.requests import InferRequest
from penstock.router.jobs import Action, CancelOn, Fail, Job, JobTable, Retry, Send

A, B = b"worker-a", b"worker-b"


def job(job_id: int, deadline: float = 100.0, is_idempotent: bool = True) -> Job:
    return Job(job_id, "blk", InferRequest("m", []), deadline, is_idempotent)


def table(max_attempts: int = 3, max_queue: int = 4) -> JobTable:
    made = JobTable(max_attempts, Random(0))
    made.declare("blk", max_queue)
    return made


def sent(actions: list[Action]) -> list[tuple[bytes, int]]:
    return [(a.worker, a.job.job_id) for a in actions if isinstance(a, Send)]


def test_a_job_goes_to_a_worker_with_credit() -> None:
    jobs = table()
    assert jobs.join(A, [("blk", 2)], 0.0) == []
    assert sent(jobs.submit(job(1), 0.0)) == [(A, 1)]


def test_a_job_waits_for_the_first_worker() -> None:
    jobs = table()
    assert jobs.submit(job(1), 0.0) == []
    assert sent(jobs.join(A, [("blk", 2)], 1.0)) == [(A, 1)]


def test_credits_bound_what_a_worker_has() -> None:
    jobs = table()
    jobs.join(A, [("blk", 2)], 0.0)
    assert [len(sent(jobs.submit(job(n), 0.0))) for n in (1, 2, 3)] == [1, 1, 0]
    done, actions = jobs.complete(A, 1, 1, 1.0)
    assert done is not None
    assert sent(actions) == [(A, 3)]


def test_the_queue_has_a_bound() -> None:
    jobs = table(max_queue=2)
    jobs.submit(job(1), 0.0)
    jobs.submit(job(2), 0.0)
    with pytest.raises(QueueFull):
        jobs.submit(job(3), 0.0)
    assert len(jobs) == 2


def test_the_emptier_worker_is_chosen() -> None:
    jobs = table()
    jobs.join(A, [("blk", 4)], 0.0)
    jobs.join(B, [("blk", 4)], 0.0)
    for n in range(8):
        jobs.submit(job(n), 0.0)
    assert jobs.queue_length("blk") == 0
    assert jobs.running("blk") == 8


def test_a_dead_workers_jobs_go_first_to_another_in_their_order() -> None:
    jobs = table()
    jobs.join(A, [("blk", 2)], 0.0)
    for n in (1, 2, 3):
        jobs.submit(job(n), 0.0)
    actions = jobs.leave(A, 1.0)
    assert {a.reason for a in actions if isinstance(a, Retry)} == {"worker_lost"}
    assert sent(jobs.join(B, [("blk", 9)], 2.0)) == [(B, 1), (B, 2), (B, 3)]


def test_late_and_unknown_replies_are_dropped() -> None:
    jobs = table()
    jobs.join(A, [("blk", 1)], 0.0)
    jobs.submit(job(1), 0.0)
    jobs.leave(A, 1.0)
    jobs.join(B, [("blk", 1)], 1.0)
    assert jobs.complete(A, 1, 1, 2.0) == (None, [])
    assert jobs.complete(B, 99, 1, 2.0) == (None, [])
    assert jobs.complete(B, 1, 1, 2.0) == (None, [])  # the attempt of its first run
    done, _ = jobs.complete(B, 1, 2, 2.0)
    assert done is not None
    assert jobs.complete(B, 1, 2, 2.0) == (None, [])  # answered once


def test_a_request_that_kills_workers_is_given_up() -> None:
    jobs = table(max_attempts=2)
    jobs.join(A, [("blk", 1)], 0.0)
    jobs.submit(job(1), 0.0)
    jobs.leave(A, 1.0)
    jobs.join(B, [("blk", 1)], 1.0)
    (failed,) = jobs.leave(B, 2.0)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, WorkerLost)
    assert len(jobs) == 0


def test_what_is_not_idempotent_never_runs_twice() -> None:
    jobs = table()
    jobs.join(A, [("blk", 1)], 0.0)
    jobs.submit(job(1, is_idempotent=False), 0.0)
    (failed,) = jobs.leave(A, 1.0)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, WorkerLost)


def test_handed_back_jobs_cost_no_attempt_and_go_elsewhere() -> None:
    jobs = table(max_attempts=2)
    jobs.join(A, [("blk", 2)], 0.0)
    jobs.submit(job(1), 0.0)
    jobs.submit(job(2), 0.0)
    jobs.join(A, [], 1.0)  # draining: offers nothing
    actions = jobs.hand_back(A, [1, 2], 1.0)
    assert sent(actions) == []
    assert sent(jobs.join(B, [("blk", 2)], 2.0)) == [(B, 1), (B, 2)]
    assert all(isinstance(action, Retry) for action in jobs.leave(B, 3.0))  # the first death, not the second


def test_deadlines_fail_waiting_and_running_jobs() -> None:
    jobs = table()
    jobs.join(A, [("blk", 1)], 0.0)
    jobs.submit(job(1, deadline=5.0), 0.0)
    jobs.submit(job(2, deadline=6.0), 0.0)
    jobs.submit(job(3, deadline=50.0), 0.0)
    assert jobs.tick(4.0) == []
    actions = jobs.tick(7.0)
    assert [a.job.job_id for a in actions if isinstance(a, Fail)] == [1, 2]
    assert all(isinstance(a.error, DeadlineExceeded) for a in actions if isinstance(a, Fail))
    assert CancelOn(A, 1) in actions
    assert jobs.running("blk") == 1


def test_cancel_leaves_the_queue_or_tells_the_worker() -> None:
    jobs = table()
    jobs.join(A, [("blk", 1)], 0.0)
    jobs.submit(job(1), 0.0)
    jobs.submit(job(2), 0.0)
    assert jobs.cancel(2, 1.0) == []
    assert jobs.queue_length("blk") == 0
    assert jobs.cancel(1, 1.0) == [CancelOn(A, 1)]
    assert jobs.cancel(1, 1.0) == []


def test_cancelled_jobs_do_not_pile_up_in_the_line() -> None:
    jobs = table(max_queue=10)
    for n in range(5000):
        jobs.submit(job(n), 0.0)
        jobs.cancel(n, 0.0)
    assert len(jobs._queues["blk"].waiting) <= 64 + 10
    assert len(jobs._deadlines) <= 1010


def test_a_retired_block_fails_what_waits() -> None:
    jobs = table()
    jobs.submit(job(1), 0.0)
    (failed,) = jobs.retire("blk", ModelNotReady("unloaded"))
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, ModelNotReady)
    assert len(jobs) == 0


def test_random_histories_lose_and_double_nothing() -> None:
    """Every job ends exactly once, whatever workers do."""
    for seed in range(30):
        rng = Random(seed)
        jobs = JobTable(1000, Random(seed))
        jobs.declare("blk", 10_000)
        running: dict[tuple[bytes, int], int] = {}
        ended: list[int] = []
        up: set[bytes] = set()

        def take(actions: list[Action], running: dict[tuple[bytes, int], int] = running) -> None:
            for action in actions:
                assert not isinstance(action, Fail)
                if isinstance(action, Send):
                    running[action.worker, action.job.job_id] = action.job.attempt

        for step in range(400):
            worker = rng.choice([A, B, b"worker-c"])
            event = rng.random()
            if event < 0.5:
                take(jobs.submit(job(step, 1e9), step))
            elif event < 0.6 and worker not in up:
                up.add(worker)
                take(jobs.join(worker, [("blk", rng.randint(1, 5))], step))
            elif event < 0.65 and worker in up:
                up.discard(worker)
                for key in [key for key in running if key[0] == worker]:
                    del running[key]
                take(jobs.leave(worker, step))
            elif running:
                (who, job_id), attempt = rng.choice(list(running.items()))
                del running[who, job_id]
                done, actions = jobs.complete(who, job_id, attempt, step)
                assert done is not None
                ended.append(done.job_id)
                take(actions)
        assert len(ended) == len(set(ended))
        assert len(jobs) == jobs.queue_length("blk") + jobs.running("blk")
