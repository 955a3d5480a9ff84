"""A block's runner: jobs in, batches, answers out."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import pytest

from benchmarks.waiting import until
from penstock.core.errors import DeadlineExceeded, DeviceOutOfMemory, EngineFailed, InvalidTensor
from penstock.core.settings import Batching
from penstock.core.signature import TokenRows
from penstock.core.tensors import Array, Tensor, to_array
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import TaskRequest
from penstock.tasks.tensor import TensorTask
from penstock.worker.running.batch_runner import MAX_LONG_WAITS
from penstock.worker.running.block_runner import now
from penstock.worker.worker_job import WorkerJob
from tests.worker_bed import MODEL, Bed, Doubler


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    made = Bed(ModelSettings(batching=Batching(max_rows=8)))
    yield made
    made.close()


async def test_every_job_gets_its_own_answer(bed: Bed) -> None:
    for n in range(50):
        bed.send(n, n)
    await bed.wait(50)
    assert [bed.value(n) for n in range(50)] == [2.0 * n for n in range(50)]
    statistics = bed.runner.statistics
    assert statistics.inference_count == 50
    assert statistics.success.count == 50
    assert statistics.compute_input.count == statistics.compute_infer.count == statistics.compute_output.count == 50
    assert sum(rows * batch.compute_infer.count for rows, batch in statistics.batches.items()) == 50
    assert sum(statistics.closed.values()) == statistics.execution_count


async def test_waiting_jobs_run_together(bed: Bed) -> None:
    bed.engine.gate.clear()
    bed.send(0, 0)
    await asyncio.sleep(0)
    for n in range(1, 9):
        bed.send(n, n)
    await asyncio.sleep(0)
    bed.engine.gate.set()
    await bed.wait(9)
    assert bed.engine.batches == [1, 8]


async def test_an_error_of_one_request_does_not_fail_its_neighbours(bed: Bed) -> None:
    bed.engine.gate.clear()
    bed.send(0, 0)
    await asyncio.sleep(0)
    for n, value in enumerate([1, -1, 3], start=1):
        bed.send(n, value)
    await asyncio.sleep(0)
    bed.engine.gate.set()
    await bed.wait(4)
    assert (bed.value(1), bed.value(3)) == (2.0, 6.0)
    assert isinstance(bed.answers[2], EngineFailed)
    assert bed.runner.statistics.fail.count == 1


async def test_a_batch_without_device_memory_is_run_in_halves(bed: Bed) -> None:
    bed.engine.gate.clear()
    bed.engine.most_rows = 2
    bed.send(0, 0)
    await asyncio.sleep(0)
    for n in range(1, 9):
        bed.send(n, n)
    await asyncio.sleep(0)
    bed.engine.gate.set()
    await bed.wait(9)
    assert [bed.value(n) for n in range(9)] == [2.0 * n for n in range(9)]
    assert bed.engine.batches == [1, 8, 4, 2, 2, 4, 2, 2]
    bed.engine.batches.clear()
    bed.send(20, *range(5))  # the rows of one request
    await until(lambda: bed.engine.batches == [5, 2, 3, 1, 2] and not len(bed.runner))
    answer = bed.answers[20]
    assert isinstance(answer, list)
    assert to_array(answer[0]).ravel().tolist() == [0, 2, 4, 6, 8]
    bed.engine.most_rows = 0
    bed.send(9, 9)
    await bed.wait(11)
    assert isinstance(bed.answers[9], DeviceOutOfMemory)
    bed.engine.most_rows = 8
    bed.send(10, 10)
    await bed.wait(12)
    assert bed.value(10) == 20.0


async def test_an_invalid_request_is_answered_at_once(bed: Bed) -> None:
    job = WorkerJob(1, 1, TaskRequest([Tensor("q", "FP32", (1, 1), b"1234")], []), now() + 9, bed.answered)
    bed.runner.accept(job)
    await bed.wait(1)
    assert isinstance(bed.answers[1], InvalidTensor)


async def test_cancelled_jobs_are_neither_answered_nor_run(bed: Bed) -> None:
    bed.engine.gate.clear()
    running = bed.send(0, 0)
    await asyncio.sleep(0)
    waiting = bed.send(1, 1)
    await asyncio.sleep(0)
    bed.runner.cancel(running)
    bed.runner.cancel(waiting)
    bed.engine.gate.set()
    bed.send(2, 2)
    await bed.wait(1)
    assert list(bed.answers) == [2]
    assert bed.engine.batches == [1, 1]


async def test_expired_jobs_are_removed_before_the_batch_forms(bed: Bed) -> None:
    bed.engine.gate.clear()
    bed.send(0, 0)
    await asyncio.sleep(0)
    bed.send(1, 1, timeout_s=0.0)
    bed.send(2, 2)
    await asyncio.sleep(0)
    bed.runner.expire(now() + 0.001)
    assert isinstance(bed.answers[1], DeadlineExceeded)
    bed.engine.gate.set()
    await bed.wait(3)
    assert bed.value(2) == 4.0
    assert bed.engine.batches == [1, 1]


async def test_hand_back_returns_only_jobs_that_have_not_started(bed: Bed) -> None:
    bed.engine.gate.clear()
    bed.send(0, 0)
    await asyncio.sleep(0)
    bed.send(1, 1)
    bed.send(2, 2)
    await asyncio.sleep(0)
    assert [job.job_id for job in bed.runner.hand_back()] == [1, 2]
    bed.engine.gate.set()
    await asyncio.wait_for(bed.runner.drain(), 10)
    assert list(bed.answers) == [0]


async def test_a_recall_removes_a_job_that_has_not_started(bed: Bed) -> None:
    bed.engine.gate.clear()
    running = bed.send(0, 0)
    await asyncio.sleep(0)
    waiting = bed.send(1, 1)
    await asyncio.sleep(0)
    assert not bed.runner.recall(running)
    assert bed.runner.recall(waiting)
    assert not bed.runner.recall(waiting)
    bed.engine.gate.set()
    await asyncio.wait_for(bed.runner.drain(), 10)
    assert list(bed.answers) == [0]


async def test_quick_batches_run_on_the_loop_with_the_same_answers(bed: Bed) -> None:
    for n in range(200):
        bed.send(n, n)
        await bed.wait(n + 1)
    assert [bed.value(n) for n in range(200)] == [2.0 * n for n in range(200)]
    assert bed.engine.threads == {"m-0", "MainThread"}


async def test_a_model_with_unpredictable_cost_never_runs_on_the_loop() -> None:
    made = Bed(ModelSettings(), is_steady=False)
    for n in range(100):
        made.send(n, n)
        await made.wait(n + 1)
    assert made.engine.threads == {"m-0"}
    made.runner.close()


async def test_few_rows_of_tokens_on_a_gpu_run_on_the_loop_if_nothing_else_waits() -> None:
    signature = replace(MODEL, token_rows=TokenRows(is_marked=True))
    made = Bed(ModelSettings(), is_steady=False, signature=signature)
    for n in range(0, 100, 2):
        made.send(n, n)
        made.send(n + 1, n)
        await made.wait(n + 2)
    assert made.engine.threads == {"m-0"}
    for n in range(100, 200):
        made.send(n, n)
        await made.wait(n + 1)
    assert made.engine.threads == {"m-0", "MainThread"}
    made.runner.close()


class Waiter(Doubler):
    """An engine that waits for other threads and uses little of its own thread's time."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loop = 0

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self.on_loop += threading.current_thread() is threading.main_thread()
        time.sleep(0.0005)
        return super().infer(instance, inputs, outputs)


async def test_a_model_that_waits_for_others_soon_runs_in_its_thread_only() -> None:
    engine = Waiter()
    made = Bed(ModelSettings(), engine=engine)
    for n in range(100):
        made.send(n, n)
        await made.wait(n + 1)
    assert 0 < engine.on_loop <= MAX_LONG_WAITS
    made.close()


class Contended(Doubler):
    """An engine that waits for the interpreter, as if behind a busy loop."""

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.0005)
        return super().infer(instance, inputs, outputs)


async def test_waiting_for_the_interpreter_does_not_make_a_model_slow() -> None:
    made = Bed(ModelSettings(), engine=Contended())
    for n in range(100):
        made.send(n, n)
        await made.wait(n + 1)
    assert "MainThread" in made.engine.threads
    made.close()


class HeavyTask(TensorTask):
    is_prepare_cheap = False

    def weigh(self, request: TaskRequest) -> int:
        return 2**25


async def test_a_requests_memory_quota_is_released_however_it_ends() -> None:
    """Run without the garbage collector: nothing may refer to the request."""
    bed = Bed(ModelSettings(), task=HeavyTask)
    gc.disable()
    try:
        for number, value in enumerate((1.0, -1.0)):  # the second one fails
            bed.send(number, value)
        await bed.wait(2)
        bed.engine.gate.clear()
        running = bed.send(2, 1.0)
        await until(lambda: bed.engine.entered == 3)
        bed.runner.cancel(running)
        del running
        bed.engine.gate.set()
        bed.answers.clear()
        await until(lambda: not bed.room._held_bytes)
    finally:
        gc.enable()
        bed.close()


async def test_close_closes_the_engine_after_its_threads() -> None:
    made = Bed(ModelSettings())
    made.send(1, 1)
    await made.wait(1)
    made.runner.close()
    await until(lambda: made.engine.is_closed, "the engine is closed")
