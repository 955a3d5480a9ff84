"""Health: ejection and readmission of workers, and that some workers always stay."""

from itertools import pairwise

import pytest

from penstock.core.settings import Health
from penstock.router.actions import FailJob, ReportEjection, ReportRestoration, SendProbe
from penstock.router.health import SlotFailures, compute_ejection_limit
from tests.unit.router.tables import BLOCK, A, B, C, job, join, next_due, rules, sent, table

D = b"worker-d"
EAGER = Health(failures=3, timeouts=2, eject_s=5.0)


class Bench:
    """A table whose workers fail when the test says so."""

    def __init__(self, health: Health = EAGER, workers: tuple[bytes, ...] = (A, B)) -> None:
        self.jobs = table(rules("round_robin", 100, health=health))
        self._next = 0
        for worker in workers:
            join(self.jobs, worker, 2)

    def fail(self, worker: bytes, times: int, code: str = "engine_failed", now: float = 0.0) -> list[object]:
        """Fail jobs of this worker only: jobs of the others succeed."""
        actions: list[object] = []
        while times:
            self._next += 1
            ((taker, number),) = sent(self.jobs.submit(job(self._next, 1e9), now))
            is_its = taker == worker
            times -= is_its
            actions += self.jobs.complete(taker, number, 1, now, code if is_its else "", "out of memory")[1]
        return actions

    def takers(self, now: float = 0.0) -> set[bytes]:
        """Return the workers that get jobs, out of eight jobs that end at once."""
        found = set()
        for _ in range(8):
            self._next += 1
            ((taker, number),) = sent(self.jobs.submit(job(self._next, 1e9), now))
            self.jobs.complete(taker, number, 1, now)
            found.add(taker)
        return found


@pytest.mark.parametrize("code", ["engine_failed", "internal", "wire_error"])
def test_consecutive_failures_eject_a_worker(code: str) -> None:
    bench = Bench()
    assert bench.fail(A, 2, code) == []
    assert bench.takers() == {A, B}  # and the successes between them restart the count
    assert bench.fail(A, 2, code) == []
    assert bench.fail(A, 1, code) == [ReportEjection(A, BLOCK, "3 failures in a row; last: out of memory")]
    assert bench.takers() == {B}
    ejected, healthy = bench.jobs.list_slot_states(BLOCK, 2.0)
    assert (ejected.state, ejected.reason) == ("ejected", "3 failures in a row; last: out of memory")
    assert (ejected.ejected_for_s, ejected.next_probe_s) == (2.0, 3.0)
    assert (healthy.state, healthy.reason, healthy.ejected_for_s) == ("healthy", "", 0.0)


@pytest.mark.parametrize("code", ["invalid_tensor", "invalid_image", "request_too_large", "cancelled", "queue_timeout"])
def test_faults_of_requests_eject_no_worker(code: str) -> None:
    bench = Bench()
    assert bench.fail(A, 20, code) == []
    assert bench.takers() == {A, B}


def test_deadlines_that_pass_while_running_eject_a_worker() -> None:
    jobs = table(rules(max_queue=100, health=EAGER))
    join(jobs, A, 1)
    jobs.submit(job(1, deadline=1.0), 0.0)
    jobs.submit(job(2, deadline=2.0), 0.0)
    jobs.tick(1.0)
    join(jobs, B, 1, 1.0)
    jobs.submit(job(3, deadline=50.0), 1.0)  # A has job 2
    actions = jobs.tick(2.0)
    assert ReportEjection(A, BLOCK, "2 deadlines in a row passed while it ran requests") in actions


def test_deadlines_that_pass_in_the_queue_eject_no_worker() -> None:
    jobs = table(rules(max_queue=100, health=EAGER))
    join(jobs, A, 1)
    join(jobs, B, 1)
    for n in range(2):
        jobs.submit(job(n, deadline=1e9), 0.0)
    for n in range(2, 10):
        jobs.submit(job(n, deadline=1.0), 0.0)
    actions = jobs.tick(2.0)
    assert len(actions) == 8
    assert all(isinstance(action, FailJob) for action in actions)


def test_a_worker_that_reports_a_passed_deadline_has_timed_out() -> None:
    bench = Bench()
    (ejected,) = bench.fail(A, 2, "deadline_exceeded")
    assert isinstance(ejected, ReportEjection)


def test_zero_disables_ejection() -> None:
    bench = Bench(Health(failures=0, timeouts=0))
    assert bench.fail(A, 50) == []
    assert bench.fail(A, 50, "deadline_exceeded") == []


def test_a_successful_probe_readmits_a_worker() -> None:
    bench = Bench()
    bench.fail(A, 3, now=10.0)
    assert next_due(bench.jobs) == 15.0
    assert bench.jobs.tick(14.9) == []
    assert bench.jobs.tick(15.0) == [SendProbe(A, BLOCK)]
    assert bench.jobs.tick(16.0) == []
    assert bench.jobs.receive_probe_result(A, BLOCK, "", 16.0) == [ReportRestoration(A, BLOCK)]
    assert bench.takers(16.0) == {A, B}
    assert bench.jobs.receive_probe_result(A, BLOCK, "", 17.0) == []
    assert bench.jobs.tick(1000.0) == []
    assert bench.fail(A, 2, now=1000.0) == []  # it starts with a clean record


@pytest.mark.parametrize("is_answered", [True, False])
def test_the_time_between_probes_doubles_up_to_its_limit(is_answered: bool) -> None:
    bench = Bench()
    bench.fail(A, 3)
    probes: list[float] = []
    while len(probes) < 7:
        now = next_due(bench.jobs)
        assert now is not None
        if bench.jobs.tick(now):
            probes.append(now)
            if is_answered:
                assert bench.jobs.receive_probe_result(A, BLOCK, "still broken", now + 1.0) == []
    lost = 1.0 if is_answered else 5.0  # until the answer, or until the probe was given up
    assert probes[0] == 5.0
    assert [later - earlier - lost for earlier, later in pairwise(probes)] == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert bench.takers() == {B}


def test_a_late_answer_to_a_probe_counts_if_it_is_good() -> None:
    bench = Bench()
    bench.fail(A, 3)
    bench.jobs.tick(5.0)
    bench.jobs.tick(10.0)  # the probe was given up
    due = next_due(bench.jobs)
    assert bench.jobs.receive_probe_result(A, BLOCK, "broken", 11.0) == []
    assert next_due(bench.jobs) == due
    assert bench.jobs.receive_probe_result(A, BLOCK, "", 12.0) == [ReportRestoration(A, BLOCK)]
    assert next_due(bench.jobs) is None


def test_the_last_healthy_worker_is_never_ejected() -> None:
    bench = Bench()
    assert len(bench.fail(A, 3)) == 1
    assert bench.fail(B, 50) == []
    assert bench.takers() == {B}


def test_no_more_than_half_of_the_workers_are_ejected() -> None:
    workers = tuple(b"worker-%d" % n for n in range(7))
    bench = Bench(workers=workers)
    ejected = [len(bench.fail(worker, 3)) for worker in workers]
    assert ejected == [1, 1, 1, 0, 0, 0, 0]
    bench.jobs.tick(5.0)
    assert bench.jobs.receive_probe_result(workers[0], BLOCK, "", 6.0) == [ReportRestoration(workers[0], BLOCK)]
    assert len(bench.fail(workers[5], 3, now=6.0)) == 1  # there is room for another ejection


def test_when_the_healthy_workers_leave_the_first_ejected_one_takes_jobs_again() -> None:
    bench = Bench(workers=(A, B, C, D))
    bench.fail(A, 3)
    bench.fail(B, 3)
    assert bench.takers() == {C, D}
    assert bench.jobs.leave(C, 1.0) == [ReportRestoration(A, BLOCK)]
    assert bench.jobs.leave(D, 1.0) == []
    assert bench.takers() == {A}
    assert bench.jobs.leave(A, 2.0) == [ReportRestoration(B, BLOCK)]
    assert bench.takers() == {B}


def test_jobs_running_on_an_ejected_worker_end_without_readmitting_it() -> None:
    jobs = table(rules(max_queue=100, health=EAGER))
    join(jobs, A, 4)
    for n in range(4):
        jobs.submit(job(n), 0.0)
    join(jobs, B, 4)
    for n in range(3):
        jobs.complete(A, n, 1, 1.0, "internal", "x")
    done, actions = jobs.complete(A, 3, 1, 2.0)
    assert done is not None
    assert actions == []
    assert {sent(jobs.submit(job(n), 2.0))[0][0] for n in range(10, 14)} == {B}
    assert sent(jobs.submit(job(14), 2.0)) == []


def test_jobs_waiting_for_an_ejected_worker_are_placed_again() -> None:
    jobs = table(rules("hash", 100, health=EAGER))
    join(jobs, A, 3)
    join(jobs, B, 1)
    key = next(f"k-{n}" for n in range(100) if jobs.find_owner(BLOCK, f"k-{n}") == A)
    for n in range(6):
        jobs.submit(job(n, key=key), 0.0)
    for n in range(2):
        jobs.complete(A, n, 1, 1.0, "internal", "x")
    actions = jobs.complete(A, 2, 1, 1.0, "internal", "x")[1]
    assert isinstance(actions[0], ReportEjection)
    assert sent(actions) == [(B, 5)]  # 3 and 4 had been sent to A when other jobs failed there
    assert jobs.find_owner(BLOCK, key) == B


def test_a_worker_that_no_longer_offers_the_block_is_not_probed() -> None:
    bench = Bench()
    bench.fail(A, 3)
    bench.jobs.join(A, [], 1.0)
    assert bench.jobs.tick(100.0) == []
    assert bench.jobs.receive_probe_result(A, BLOCK, "", 100.0) == []
    join(bench.jobs, A, 2, 101.0)
    assert bench.takers() == {A, B}


def test_an_ejected_worker_that_reconnects_stays_ejected() -> None:
    bench = Bench()
    bench.fail(A, 3)
    join(bench.jobs, A, 4, 1.0)
    assert bench.takers() == {B}


@pytest.mark.parametrize(("slots", "bound"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_the_number_of_ejected_workers_is_limited(slots: int, bound: int) -> None:
    assert compute_ejection_limit(slots) == bound


def test_a_long_message_is_shortened() -> None:
    condition = SlotFailures()
    condition.count_failure(Health(), "x" * 10_000)
    assert len(condition.reason) < 400


def test_jobs_waiting_for_a_draining_worker_move_even_if_an_ejected_one_returns() -> None:
    workers = (A, B, C, b"worker-d")
    bench = Bench(EAGER, workers)
    bench.fail(A, 3)
    bench.fail(B, 3)
    jobs = bench.jobs
    sessions = [f"s-{n}" for n in range(200) if jobs.find_owner(BLOCK, f"s-{n}") == C]
    for n, session in enumerate(sessions[:12], start=1000):
        jobs.submit(job(n, session=session), 0.0)
    assert jobs.count_jobs()[BLOCK][0] == 10
    actions = jobs.join(C, [], 1.0)
    assert actions[0] == ReportRestoration(A, BLOCK)
    for worker, number in sent(actions):
        assert worker == jobs.find_owner(BLOCK, sessions[number - 1000])
    standing = {slot.worker: slot for slot in jobs.list_slot_states(BLOCK, 1.0)}
    for worker in (A, b"worker-d"):
        assert standing[worker].in_flight == 2, "no worker is idle while jobs wait for it"
    assert jobs.count_jobs()[BLOCK][0] == 6
