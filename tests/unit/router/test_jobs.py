"""The job table: the same events always give the same actions."""

import pytest

from penstock.core.errors import DeadlineExceeded, ModelNotReady, QueueFull, WorkerLost
from penstock.router.actions import CancelJob, CountRetry, FailJob, SendJob
from penstock.router.jobs import MOVE_TIMEOUT_S
from penstock.router.slots import Offer
from tests.unit.router.tables import BLOCK, A, B, failed, job, join, next_due, rules, sent, table


def test_a_job_is_sent_to_a_worker_with_credit() -> None:
    jobs = table()
    assert join(jobs, A, 2, 0.0) == []
    assert sent(jobs.submit(job(1), 0.0)) == [(A, 1)]


def test_a_job_waits_for_the_first_worker() -> None:
    jobs = table()
    assert jobs.submit(job(1), 0.0) == []
    assert sent(join(jobs, A, 2, 1.0)) == [(A, 1)]


def test_credits_limit_a_workers_jobs() -> None:
    jobs = table()
    join(jobs, A, 2, 0.0)
    assert [len(sent(jobs.submit(job(n), 0.0))) for n in (1, 2, 3)] == [1, 1, 0]
    done, actions = jobs.complete(A, 1, 1, 1.0)
    assert done is not None
    assert sent(actions) == [(A, 3)]


def test_the_queue_is_bounded() -> None:
    jobs = table(rules(max_queue=2))
    jobs.submit(job(1), 0.0)
    jobs.submit(job(2), 0.0)
    with pytest.raises(QueueFull):
        jobs.submit(job(3), 0.0)
    assert len(jobs) == 2


def test_the_emptier_worker_is_chosen() -> None:
    jobs = table()
    join(jobs, A, 4, 0.0)
    join(jobs, B, 4, 0.0)
    for n in range(8):
        jobs.submit(job(n), 0.0)
    assert jobs.count_jobs()[BLOCK][0] == 0
    assert jobs.count_jobs()[BLOCK][1] == 8


def test_a_dead_workers_jobs_are_sent_first_and_in_order() -> None:
    jobs = table()
    join(jobs, A, 2, 0.0)
    for n in (1, 2, 3):
        jobs.submit(job(n), 0.0)
    actions = jobs.leave(A, 1.0)
    assert {a.reason for a in actions if isinstance(a, CountRetry)} == {"worker_lost"}
    assert sent(join(jobs, B, 9, 2.0)) == [(B, 1), (B, 2), (B, 3)]


def test_late_and_unknown_replies_are_dropped() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1), 0.0)
    jobs.leave(A, 1.0)
    join(jobs, B, 1, 1.0)
    assert jobs.complete(A, 1, 1, 2.0) == (None, [])
    assert jobs.complete(B, 99, 1, 2.0) == (None, [])
    assert jobs.complete(B, 1, 1, 2.0) == (None, [])  # the attempt of its first run
    done, _ = jobs.complete(B, 1, 2, 2.0)
    assert done is not None
    assert jobs.complete(B, 1, 2, 2.0) == (None, [])  # answered once


def test_a_request_that_kills_workers_is_given_up() -> None:
    jobs = table(max_attempts=2)
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1), 0.0)
    jobs.leave(A, 1.0)
    join(jobs, B, 1, 1.0)
    (failed,) = jobs.leave(B, 2.0)
    assert isinstance(failed, FailJob)
    assert isinstance(failed.error, WorkerLost)
    assert len(jobs) == 0


def test_a_non_idempotent_request_never_runs_twice() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1, is_idempotent=False), 0.0)
    (failed,) = jobs.leave(A, 1.0)
    assert isinstance(failed, FailJob)
    assert isinstance(failed.error, WorkerLost)


def test_handed_back_jobs_use_no_attempt_and_run_elsewhere() -> None:
    jobs = table(max_attempts=2)
    join(jobs, A, 2, 0.0)
    jobs.submit(job(1), 0.0)
    jobs.submit(job(2), 0.0)
    jobs.join(A, [], 1.0)  # draining: offers nothing
    actions = jobs.hand_back(A, [1, 2], 1.0)
    assert sent(actions) == []
    assert sent(join(jobs, B, 2, 2.0)) == [(B, 1), (B, 2)]
    assert all(isinstance(action, CountRetry) for action in jobs.leave(B, 3.0))  # the first death, not the second


def test_deadlines_fail_waiting_and_running_jobs() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1, deadline=5.0), 0.0)
    jobs.submit(job(2, deadline=6.0), 0.0)
    jobs.submit(job(3, deadline=50.0), 0.0)
    assert jobs.tick(4.0) == []
    actions = jobs.tick(7.0)
    assert [a.job.job_id for a in actions if isinstance(a, FailJob)] == [1, 2]
    assert all(isinstance(a.error, DeadlineExceeded) for a in actions if isinstance(a, FailJob))
    assert CancelJob(A, 1) in actions
    assert jobs.count_jobs()[BLOCK][1] == 1


def test_cancel_removes_a_waiting_job_or_notifies_the_worker() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1), 0.0)
    jobs.submit(job(2), 0.0)
    assert jobs.cancel(2, 1.0) == []
    assert jobs.count_jobs()[BLOCK][0] == 0
    assert jobs.cancel(1, 1.0) == [CancelJob(A, 1)]
    assert jobs.cancel(1, 1.0) == []


def test_cancelled_jobs_do_not_accumulate_in_the_queue() -> None:
    jobs = table(rules(max_queue=10))
    for n in range(5000):
        jobs.submit(job(n), 0.0)
        jobs.cancel(n, 0.0)
    assert jobs._queues[BLOCK].line.entries <= 64 + 10
    assert len(jobs._deadlines) <= 1010


def test_retiring_a_block_fails_its_waiting_jobs() -> None:
    jobs = table()
    jobs.submit(job(1), 0.0)
    (failed,) = jobs.retire_blocks({BLOCK: ModelNotReady("unloaded")})
    assert isinstance(failed, FailJob)
    assert isinstance(failed.error, ModelNotReady)
    with pytest.raises(ModelNotReady, match="unloaded"):
        jobs.submit(job(2), 0.0)
    assert len(jobs) == 0
    assert jobs.retire_blocks({}) == []
    assert jobs.submit(job(3), 0.0) == [], "the block is wanted again and waits for a worker"


def test_waiting_jobs_of_a_retired_block_run_on_workers_that_still_hold_it() -> None:
    jobs = table()
    join(jobs, A, 1)
    for number in (1, 2, 3):
        jobs.submit(job(number), 0.0)
    assert jobs.retire_blocks({BLOCK: ModelNotReady("unloaded")}) == []
    assert [type(action) for action in jobs.complete(A, 1, 1, 1.0)[1]] == [SendJob]
    stranded = jobs.join(A, [], 2.0)
    assert [type(action) for action in stranded] == [FailJob]
    assert jobs.complete(A, 2, 1, 3.0)[0] is not None, "the worker's running job is answered"


@pytest.mark.parametrize("is_death", [True, False])
def test_a_job_returned_by_the_last_worker_of_a_retired_block_fails_at_once(is_death: bool) -> None:
    jobs = table()
    join(jobs, A, 2)
    jobs.submit(job(1), 0.0)
    jobs.retire_blocks({BLOCK: ModelNotReady("unloaded")})
    if is_death:
        actions = jobs.leave(A, 1.0)
    else:
        jobs.join(A, [], 1.0)
        actions = jobs.hand_back(A, [1], 1.0)
    assert isinstance(actions[-1], FailJob)
    assert len(jobs) == 0


def test_the_table_knows_whether_a_block_is_served() -> None:
    jobs = table()
    join(jobs, A, 1)
    assert jobs.describe_activities()[BLOCK].last_answer_at == 0.0
    for number in (1, 2, 3):
        jobs.submit(job(number, deadline=100.0), 1.0)
    seen = jobs.describe_activities()[BLOCK]
    assert (seen.unfinished, seen.waiting, seen.unanswered, seen.last_answer_at) == (3, 2, 0, 0.0)
    jobs.complete(A, 1, 1, 5.0)
    jobs.complete(A, 2, 1, 6.0, "deadline_exceeded")
    jobs.cancel(3, 7.0)
    seen = jobs.describe_activities()[BLOCK]
    assert (seen.unfinished, seen.waiting, seen.unanswered, seen.last_answer_at) == (0, 0, 2, 5.0)
    jobs.submit(job(4, deadline=100.0), 8.0)
    jobs.submit(job(5, deadline=100.0), 8.0)
    jobs.complete(A, 4, 1, 9.0, "engine_failed")
    assert (jobs.describe_activities()[BLOCK].unanswered, jobs.describe_activities()[BLOCK].last_answer_at) == (2, 9.0)
    jobs.complete(A, 5, 1, 99.95, "engine_failed")
    assert (jobs.describe_activities()[BLOCK].unanswered, jobs.describe_activities()[BLOCK].last_answer_at) == (
        3,
        9.0,
    ), "the worker has hung since then"
    jobs.receive_probe_result(A, BLOCK, "", 110.0)
    assert jobs.describe_activities()[BLOCK].last_answer_at == 110.0
    jobs.submit(job(6), 111.0)
    jobs.submit(job(7), 111.0)
    jobs.receive_probe_result(A, BLOCK, "broken", 112.0)
    jobs.receive_probe_result(A, BLOCK, "", 113.0, is_idle=True)
    assert jobs.describe_activities()[BLOCK].last_answer_at == 110.0, "a success does not count while jobs wait"


def test_a_worker_must_not_offer_undeclared_blocks() -> None:
    with pytest.raises(KeyError):
        table().join(A, [Offer("blk-other", 1)], 0.0)


def test_a_partial_answer_leaves_the_job_running() -> None:
    jobs = table()
    join(jobs, A, 1)
    jobs.submit(job(1), 0.0)
    assert jobs.find_for_partial(B, 1, 1, 0.0) is None
    assert jobs.find_for_partial(A, 1, 2, 0.0) is None
    assert jobs.find_for_partial(A, 2, 1, 0.0) is None
    running = jobs.find_for_partial(A, 1, 1, 0.0)
    assert running is not None
    assert running.job_id == 1
    assert jobs.count_jobs()[BLOCK][1] == 1


def test_a_job_that_fails_in_a_tick_is_not_sent_in_it() -> None:
    jobs = table()
    join(jobs, A, 1)
    for n in (1, 2, 3):
        jobs.submit(job(n, deadline=5.0 + n), 0.0)
    assert sent(jobs.tick(7.5)) == [(A, 3)]


def test_the_next_due_time_is_that_of_the_earliest_remaining_job() -> None:
    jobs = table()
    assert next_due(jobs) is None
    join(jobs, A, 1)
    jobs.submit(job(1, deadline=5.0), 0.0)
    jobs.submit(job(2, deadline=9.0, queue_deadline=3.0), 0.0)
    assert next_due(jobs) == 3.0
    jobs.complete(A, 1, 1, 1.0)
    assert next_due(jobs) == 9.0  # it runs: its time in the queue no longer matters
    jobs.cancel(2, 2.0)
    assert next_due(jobs) is None


def test_slot_states_describe_every_slot() -> None:
    jobs = table(rules("hash"))
    join(jobs, A, 1, weight=2.0, distance=1)
    jobs.submit(job(1, key="x"), 0.0)
    jobs.complete(A, 1, 1, 0.25)
    jobs.submit(job(2, key="x"), 1.0)
    jobs.submit(job(3, key="x"), 1.0)
    (slot,) = jobs.list_slot_states(BLOCK, 2.0)
    assert (slot.worker, slot.name, slot.in_flight, slot.waiting, slot.credits) == (A, "worker-a", 1, 1, 1)
    assert (slot.weight, slot.distance, slot.latency_ms, slot.state, slot.reason) == (2.0, 1, 250.0, "healthy", "")
    assert jobs.list_slot_states("blk-other", 2.0) == []


def test_the_same_events_give_the_same_actions() -> None:
    def history() -> list[tuple[bytes, int]]:
        jobs = table(rules(max_queue=1000), seed=7)
        for n in range(20):
            join(jobs, b"worker-%d" % n, 3)
        actions = [action for n in range(50) for action in jobs.submit(job(n), 0.0)]
        running = [(action.worker, action.job.job_id) for action in actions if isinstance(action, SendJob)]
        return running + [found for who, n in running for found in sent(jobs.complete(who, n, 1, 1.0)[1])]

    assert history() == history()


def test_without_any_worker_jobs_are_refused_at_once_with_a_retry_hint() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.submit(job(1), 0.0)
    jobs.submit(job(2), 0.0)
    jobs.leave(A, 1.0, is_expected_back=False)
    lost, waiting = jobs.tick(1.02)
    assert isinstance(waiting, FailJob)
    assert isinstance(waiting.error, ModelNotReady)
    assert waiting.error.retry_after_s > 0
    assert isinstance(lost, FailJob)
    assert isinstance(lost.error, WorkerLost), "the job may have run"
    with pytest.raises(ModelNotReady, match="no worker"):
        jobs.submit(job(3), 1.1)
    assert len(jobs) == 0
    join(jobs, B, 1, 2.0)
    assert sent(jobs.submit(job(4), 2.0)) == [(B, 4)]


def test_a_block_that_may_move_to_another_worker_is_awaited_for_a_while() -> None:
    jobs = table()
    jobs.join(B, [], 0.0)  # connected, without the block
    join(jobs, A, 1, 0.0)
    jobs.leave(A, 1.0, is_expected_back=False)
    jobs.submit(job(1), 1.0)
    assert jobs.tick(1.0 + MOVE_TIMEOUT_S - 0.1) == []
    assert failed(jobs.tick(1.0 + MOVE_TIMEOUT_S)) == [1]
    with pytest.raises(ModelNotReady, match="no worker"):
        jobs.submit(job(2), 12.0)


def test_a_worker_that_is_restarted_is_awaited_as_long_as_a_load() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.leave(A, 1.0)
    jobs.submit(job(1), 1.0)
    assert jobs.tick(60.9) == []
    assert failed(jobs.tick(61.0)) == [1]


def test_a_worker_that_withdrew_a_block_and_then_left_is_not_awaited() -> None:
    jobs = table()
    join(jobs, A, 1, 0.0)
    jobs.join(A, [], 1.0)
    assert jobs.submit(job(1), 1.0) == []
    jobs.leave(A, 2.0, is_expected_back=False)
    assert failed(jobs.tick(2.02)) == [1]
