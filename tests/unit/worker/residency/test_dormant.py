"""Jobs of a block that is not in memory: they wait for it, and fail if it cannot be loaded."""

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull
from penstock.core.settings import Batching, Instances, Residence
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Tensor
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import TaskRequest
from penstock.telemetry.metrics import WorkerMetrics
from penstock.worker.residency.dormant import LEAST_CAPACITY, DormantBlock, now
from penstock.worker.residency.residency_actions import BlockAssignment
from penstock.worker.residency.survey import describe_from_settings
from penstock.worker.worker_job import WorkerJob

SETTINGS = ModelSettings(
    batching=Batching(max_rows=1), instances=Instances(count=1), residence=Residence(load="lazy", max_waiting_s=5.0)
)


class Runner:
    """A runner that takes jobs, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def accept(self, job: WorkerJob) -> None:
        self.calls.append(("accept", job.job_id))

    def cancel(self, job: WorkerJob) -> None:
        self.calls.append(("cancel", job.job_id))

    def recall(self, job: WorkerJob) -> bool:
        return False

    def allow(self, job: WorkerJob, credits: int) -> None:
        self.calls.append((f"allow {credits}", job.job_id))


class Bed:
    def __init__(self) -> None:
        self.woken = 0
        self.answers: dict[int, list[Tensor] | PenstockError] = {}
        self.statistics = BlockStatistics("blk", "m", "1")
        self.registry = CollectorRegistry()
        described = describe_from_settings(BlockAssignment("blk", "m", "1", "/m", 1), SETTINGS)
        self.dormant = DormantBlock(described, self._wake, self.statistics, WorkerMetrics(self.registry))

    def send(self, job_id: int, timeout_s: float = 30.0, response_credits: int = 0) -> WorkerJob:
        job = WorkerJob(job_id, 1, TaskRequest([], []), now() + timeout_s, self._answered)
        job.response_credits = response_credits
        self.dormant.accept(job)
        return job

    def failed(self, code: str) -> float:
        labels = {"model": "m", "version": "1", "code": code}
        return self.registry.get_sample_value("penstock_failures_total", labels) or 0.0

    def _wake(self) -> None:
        self.woken += 1

    def _answered(self, job: WorkerJob, outcome: list[Tensor] | PenstockError, is_partial: bool = False) -> None:
        assert job.job_id not in self.answers, "a job is answered once"
        self.answers[job.job_id] = outcome


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_jobs_wake_the_block_and_are_handed_to_its_runner_in_order(bed: Bed) -> None:
    jobs = [bed.send(number) for number in range(3)]
    assert bed.woken == 3
    assert len(bed.dormant) == 3
    runner = Runner()
    bed.dormant.hand_over(runner)
    assert runner.calls == [("accept", 0), ("accept", 1), ("accept", 2)]
    assert not len(bed.dormant)
    assert not any(job.is_gone for job in jobs)


def test_a_cancelled_job_is_not_handed_over(bed: Bed) -> None:
    kept, left = bed.send(1), bed.send(2)
    bed.dormant.cancel(left)
    assert left.is_gone
    runner = Runner()
    bed.dormant.hand_over(runner)
    assert runner.calls == [("accept", kept.job_id)]


def test_after_the_handover_cancel_and_allow_go_to_the_runner(bed: Bed) -> None:
    job = bed.send(1, response_credits=2)
    bed.dormant.allow(job, 3)
    assert job.response_credits == 5, "before the handover the job itself has the credits"
    runner = Runner()
    bed.dormant.hand_over(runner)
    bed.dormant.allow(job, 4)
    bed.dormant.cancel(job)
    assert runner.calls == [("accept", 1), ("allow 4", 1), ("cancel", 1)]
    assert job.response_credits == 5


def test_a_failed_load_fails_the_waiting_jobs_with_its_reason(bed: Bed) -> None:
    jobs = [bed.send(1), bed.send(2)]
    bed.dormant.fail("no such file")
    for job in jobs:
        error = bed.answers[job.job_id]
        assert isinstance(error, ModelNotReady)
        assert "no such file" in error.message
        assert job.is_gone
    assert bed.statistics.fail.count == 2
    assert bed.failed("model_not_ready") == 2


def test_no_job_waits_beyond_its_deadline_or_the_models_limit(bed: Bed) -> None:
    hurried, patient = bed.send(1, timeout_s=1.0), bed.send(2)
    bed.dormant.expire(patient.arrived + 1.1, "other models are loaded first")
    assert isinstance(bed.answers[hurried.job_id], DeadlineExceeded)
    assert patient.job_id not in bed.answers
    bed.dormant.expire(patient.arrived + 4.9, "")
    assert len(bed.dormant) == 1
    bed.dormant.expire(patient.arrived + 5.0, "other models are loaded first")
    error = bed.answers[patient.job_id]
    assert isinstance(error, ModelNotReady)
    assert "within 5 s" in error.message
    assert "other models are loaded first" in error.message


def test_a_waiting_job_can_be_recalled(bed: Bed) -> None:
    job = bed.send(1)
    assert bed.dormant.recall(job)
    assert not bed.dormant.recall(job)
    assert len(bed.dormant) == 0


def test_waiting_jobs_are_handed_back_when_the_worker_leaves(bed: Bed) -> None:
    jobs = [bed.send(1), bed.send(2)]
    assert bed.dormant.hand_back() == jobs
    assert bed.dormant.hand_back() == []
    assert all(job.is_gone for job in jobs)
    assert not bed.answers


def test_the_number_of_waiting_jobs_is_limited(bed: Bed) -> None:
    for number in range(LEAST_CAPACITY):
        bed.send(number)
    bed.send(LEAST_CAPACITY)
    assert isinstance(bed.answers[LEAST_CAPACITY], QueueFull)
    assert len(bed.dormant) == LEAST_CAPACITY
    assert bed.woken == LEAST_CAPACITY
