"""A block's requests prepared in its own threads: waiting, dropped and unaffected requests."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from benchmarks.waiting import until
from penstock.core.errors import DeadlineExceeded, InvalidTensor, PenstockError, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, pack_bytes
from penstock.tasks.base import Prepared, TaskRequest
from penstock.tasks.tensor import TensorTask
from penstock.worker.running.preparation import INLINE_ELEMENTS, Preparation, PreparedMemory
from penstock.worker.worker_job import WorkerJob

TEXTS = (TensorSpec("s", "BYTES", (-1,)),)
MODEL = Signature(TEXTS, TEXTS, "onnx", "fp32")
MIB = 2**20


class SlowTask(TensorTask):
    """A task that waits at a gate with every request, records its threads, and weighs what the test says."""

    is_prepare_cheap = False
    is_finish_cheap = True

    def __init__(self) -> None:
        super().__init__(MODEL, 2**20, is_batched=False)
        self.gate = threading.Event()
        self.begun: list[str] = []
        self.weight = 0

    def weigh(self, request: TaskRequest) -> int:
        return self.weight

    def prepare(self, request: TaskRequest) -> Prepared:
        (tensor,) = request.inputs
        self.begun.append(tensor.name)
        self.gate.wait(10)
        if tensor.name == "wrong":
            try:
                raise InvalidTensor("no such thing")
            except InvalidTensor as error:
                caught = error  # a cycle: the frame has the error, which has the frame
                raise InvalidTensor("it is wrong") from caught
        return Prepared([])


class Bench:
    def __init__(self, task: TensorTask, room: PreparedMemory | None = None, block_id: str = "blk") -> None:
        self.outcomes: dict[int, Prepared | PenstockError] = {}
        self.finished: dict[int, list[Tensor] | PenstockError] = {}
        self.room = room or PreparedMemory(100 * MIB)
        self.preparation = Preparation(block_id, task, self.room, None, self)
        self.has_room = lambda: not self.room._held_bytes

    def on_prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        self.outcomes[job.job_id] = outcome

    def end(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
        self.finished[job.job_id] = outcome

    def send(self, number: int, name: str = "s", timeout_s: float = 60.0, count: int = 1) -> WorkerJob:
        request = TaskRequest([Tensor(name, "BYTES", (count,), pack_bytes([b"x"] * count))], [])
        job = WorkerJob(number, 1, request, time.monotonic() + timeout_s, lambda *_: None)
        self.preparation.prepare(job)
        return job


@pytest.fixture
def task() -> Iterator[SlowTask]:
    made = SlowTask()
    yield made
    made.gate.set()


async def test_a_slow_block_delays_no_other(task: SlowTask) -> None:
    room = PreparedMemory(100 * MIB)
    slow = Bench(task, room, "slow")
    for number in range(20):
        slow.send(number)
    other = SlowTask()
    other.gate.set()
    quick = Bench(other, room, "quick")
    quick.send(1)
    await until(lambda: 1 in quick.outcomes)
    assert not slow.outcomes


async def test_a_cancelled_or_late_request_is_not_prepared(task: SlowTask) -> None:
    bench = Bench(task)
    bench.preparation._cores = 1
    bench.send(1, "first")
    await until(lambda: task.begun == ["first"])
    cancelled = bench.send(2, "cancelled")
    bench.send(3, "late", timeout_s=0.0)
    bench.send(4, "last")
    cancelled.is_gone = True
    bench.preparation.cancel(cancelled)
    assert cancelled.request.inputs == []
    task.gate.set()
    await until(lambda: 4 in bench.outcomes)
    assert task.begun == ["first", "last"]
    assert isinstance(bench.outcomes[3], DeadlineExceeded)
    assert 2 not in bench.outcomes


async def test_large_requests_wait_for_room_and_release_it(task: SlowTask) -> None:
    """Run without the garbage collector: nothing may refer to a request, however it ended."""
    bench = Bench(task)
    task.weight = 30 * MIB
    gc.disable()
    try:
        jobs = [bench.send(number, name) for number, name in enumerate(("s", "wrong", "s", "s"))]
        await until(lambda: task.begun == ["s"])
        await asyncio.sleep(0)
        assert task.begun == ["s"]  # of its share of 50
        bench.preparation.cancel(jobs.pop(2))
        task.gate.set()
        jobs.clear()
        await until(lambda: bench.outcomes.keys() == {0, 1, 3})
        bench.outcomes.clear()
        await until(bench.has_room)
    finally:
        gc.enable()
    assert task.begun == ["s", "wrong", "s"]


async def test_a_request_larger_than_the_share_is_refused(task: SlowTask) -> None:
    bench = Bench(task)
    task.weight = 51 * MIB
    bench.send(1)
    assert isinstance(bench.outcomes[1], RequestTooLarge)
    assert "limits.max_prepared_bytes" in bench.outcomes[1].message


class NotingTask(TensorTask):
    def __init__(self) -> None:
        super().__init__(MODEL, 2**20, is_batched=False)
        self.threads: list[str] = []

    def prepare(self, request: TaskRequest) -> Prepared:
        self.threads.append(threading.current_thread().name)
        return super().prepare(request)

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        self.threads.append(threading.current_thread().name)
        return super().finish(request, prepared, results)


@pytest.mark.parametrize(("count", "is_inline"), [(1, True), (INLINE_ELEMENTS, True), (INLINE_ELEMENTS + 1, False)])
async def test_only_small_requests_are_prepared_on_the_loop(count: int, is_inline: bool) -> None:
    task = NotingTask()
    bench = Bench(task)
    job = bench.send(1, count=count)
    await until(lambda: 1 in bench.outcomes)
    outcome = bench.outcomes.pop(1)
    assert isinstance(outcome, Prepared)
    job.prepared = outcome
    job.results = [[np.array([b"y"] * count, dtype=object)]]
    bench.preparation.finish(job)
    await until(lambda: 1 in bench.finished)
    here = threading.current_thread().name
    assert [name == here for name in task.threads] == [is_inline, is_inline]
