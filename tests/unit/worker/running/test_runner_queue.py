"""A block's queue: levels, queue timeouts, deadlines and probes, whatever its instances do."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from benchmarks.waiting import until
from penstock.core.errors import DeadlineExceeded, QueueTimeout
from penstock.core.settings import Batching, Priorities, QueuePolicy
from penstock.core.tensors import Array, to_array
from penstock.models.model_yaml import ModelSettings
from penstock.worker.running.block_runner import MAX_PROBES
from tests.worker_bed import Bed, Doubler, RowsTask

LEVELS = ModelSettings(
    batching=Batching(max_rows=1),
    priorities=Priorities(levels=3, default=2, by_level={3: QueuePolicy(on_timeout="delay")}),
)


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    """Yield a block whose only instance is busy with job 0 until the gate opens."""
    made = Bed(LEVELS, is_steady=False)
    made.engine.gate.clear()
    made.send(0, 0)
    await until(lambda: made.runner.idle == 0)
    yield made
    made.close()


async def test_a_high_level_overtakes_waiting_jobs(bed: Bed) -> None:
    bed.send(1, 1, priority=3)
    bed.send(2, 2, priority=2)
    bed.send(3, 3, priority=1)
    bed.send(4, 4, priority=1)
    bed.engine.gate.set()
    await bed.wait(5)
    assert bed.engine.values == [0, 3, 4, 2, 1]


async def test_a_queue_timeout_rejects_in_time_while_the_model_is_busy(bed: Bed) -> None:
    bed.send(1, 1, queue_timeout_s=0.02)
    bed.send(2, 2, queue_timeout_s=30.0)
    await bed.wait(1)
    assert isinstance(bed.answers[1], QueueTimeout)
    assert "level 1" in bed.answers[1].message
    assert bed.count("penstock_failures_total", code="queue_timeout") == 1
    bed.engine.gate.set()
    await bed.wait(3)
    assert bed.value(2) == 4.0
    assert bed.engine.values == [0, 2]


async def test_deadlines_are_enforced_in_time_while_the_model_is_busy(bed: Bed) -> None:
    bed.send(1, 1, timeout_s=20.0)
    bed.send(2, 2, timeout_s=0.03)
    bed.send(3, 3, timeout_s=0.01)
    await bed.wait(2)
    assert list(bed.answers) == [3, 2]
    assert all(isinstance(outcome, DeadlineExceeded) for outcome in bed.answers.values())
    bed.engine.gate.set()
    await bed.wait(4)
    assert bed.value(1) == 2.0


async def test_a_delaying_level_serves_delayed_jobs_after_its_others(bed: Bed) -> None:
    bed.send(1, 1, priority=3, queue_timeout_s=0.0)
    bed.send(2, 2, priority=3, queue_timeout_s=30.0)
    await asyncio.sleep(0)
    bed.engine.gate.set()
    await bed.wait(3)
    assert bed.engine.values == [0, 2, 1]
    assert bed.value(1) == 2.0
    assert bed.count("penstock_failures_total", code="queue_timeout") == 0


async def test_a_queue_deadline_that_passed_in_transit_is_noticed_before_the_batch_forms() -> None:
    made = Bed(LEVELS)
    made.send(1, 1, queue_timeout_s=0.0)
    made.send(2, 2, timeout_s=0.0)
    await made.wait(2)
    assert isinstance(made.answers[1], QueueTimeout)
    assert isinstance(made.answers[2], DeadlineExceeded)
    assert made.engine.batches == []
    made.close()


async def test_a_started_request_does_not_time_out_in_the_queue() -> None:
    made = Bed(ModelSettings(), is_steady=False, task=RowsTask)
    made.engine.gate.clear()
    made.send(1, 1, 2, 3, queue_timeout_s=0.02)
    await until(lambda: made.runner.idle == 0)
    made.send(2, 9, queue_timeout_s=0.03)
    await made.wait(1)
    assert list(made.answers) == [2]  # due later, so the deadline of the first has passed as well
    made.engine.gate.set()
    await made.wait(2)
    outcome = made.answers[1]
    assert isinstance(outcome, list)
    assert to_array(outcome[0]).ravel().tolist() == [2.0, 4.0, 6.0]
    made.close()


async def test_all_of_many_deadlines_are_enforced(bed: Bed) -> None:
    for n in range(1, 201):
        bed.send(n, n, timeout_s=0.001 * (n % 40), priority=1 + n % 3)
    await bed.wait(200)
    assert bed.runner.waiting == 0
    assert 0 not in bed.answers


async def test_a_probe_runs_the_model_in_turn() -> None:
    made = Bed(LEVELS, is_steady=False)
    told: list[str] = []
    made.engine.gate.clear()
    made.send(0, 5)
    await until(lambda: made.runner.idle == 0)
    made.runner.probe(told.append)
    made.runner.probe(told.append)
    made.engine.gate.set()
    await until(lambda: len(told) == 2)
    assert told == ["", ""]
    assert made.engine.values == [5, 0]  # both were answered by one run
    assert made.engine.threads == {"m-0"}
    assert made.runner.statistics.execution_count == 1  # a probe is not a request
    made.close()


class Flaky(Doubler):
    is_lost = True

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        if self.is_lost:
            raise RuntimeError("the device is gone")
        return super().infer(instance, inputs, outputs)


async def test_a_probe_reports_the_error() -> None:
    engine = Flaky()
    made = Bed(LEVELS, engine=engine)
    told: list[str] = []
    made.runner.probe(told.append)
    await until(lambda: bool(told))
    engine.is_lost = False
    made.runner.probe(told.append)
    await until(lambda: len(told) == 2)
    assert told == ["RuntimeError: the device is gone", ""]
    made.close()


async def test_a_model_without_warmup_gets_no_invented_inputs() -> None:
    made = Bed(LEVELS.model_copy(update={"warm_up": False}))
    told: list[str] = []
    made.runner.probe(told.append)
    await until(lambda: told == [""])
    assert made.engine.batches == []
    made.close()


async def test_a_probe_of_a_hanging_model_never_answers_and_blocks_nothing_else(bed: Bed) -> None:
    told: list[str] = []
    for _ in range(MAX_PROBES + 10):
        bed.runner.probe(told.append)
    other = Bed(LEVELS)
    other.runner.probe(lambda problem: told.append("other " + problem))
    await until(lambda: told == ["other "])
    other.send(1, 1)
    await other.wait(1)
    waiting = bed.send(1, 1)
    bed.send(2, 2, timeout_s=0.01)
    await bed.wait(1)
    bed.runner.cancel(waiting)
    assert (list(bed.answers), bed.runner.waiting, told) == ([2], 0, ["other "])
    bed.engine.gate.set()
    await until(lambda: len(told) == MAX_PROBES + 1)  # the model continued: kept probes are answered
    other.close()


async def test_one_of_two_instances_hangs_and_the_other_serves_and_answers_probes() -> None:
    made = Bed(LEVELS, instances=2, is_steady=False)
    made.engine.gate.clear()
    made.send(0, 0)
    await until(lambda: made.engine.entered == 1)
    hung = made.engine.gate
    made.engine.gate = type(hung)()  # the other instance has its own
    made.engine.gate.set()
    made.send(1, 1)
    await made.wait(1)
    told: list[str] = []
    made.runner.probe(told.append)
    await until(lambda: told == [""])
    assert list(made.answers) == [1]
    hung.set()
    await made.wait(2)
    made.close()
