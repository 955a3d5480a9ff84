"""A block's requests prepared and finished in task processes, as its runner asks for it."""

import asyncio
import time

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.core.signature import Signature
from penstock.core.tensors import Tensor, TensorSpec, from_array, pack_bytes
from penstock.models.building import TaskSpec, build_task
from penstock.models.model_yaml import ModelSettings
from penstock.models.samples.photos import photos
from penstock.tasks.base import Prepared, TaskRequest
from penstock.worker.offload.task_pool import TaskProcesses
from penstock.worker.running.preparation import INLINE_BYTES_PER_TURN, Preparation, PreparedMemory
from penstock.worker.worker_job import WorkerJob
from tests.unit.worker.offload.task_calls import NOWHERE, UPSCALE

VECTORS = (TensorSpec("x", "FP32", (-1, 2)),)
TENSOR = TaskSpec(NOWHERE, ModelSettings(), Signature(VECTORS, VECTORS, "onnx", "fp32"), Limits())


class Outcomes:
    """A PreparationOwner that records its calls."""

    def __init__(self) -> None:
        self.of_prepare: asyncio.Queue[tuple[WorkerJob, Prepared | PenstockError]] = asyncio.Queue()
        self.of_finish: asyncio.Queue[tuple[WorkerJob, list[Tensor] | PenstockError]] = asyncio.Queue()

    def on_prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        self.of_prepare.put_nowait((job, outcome))

    def end(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> None:
        self.of_finish.put_nowait((job, outcome))


class Bed:
    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self.prepared, self.finished = self.outcomes.of_prepare, self.outcomes.of_finish
        self.processes = TaskProcesses(1)
        self.room = PreparedMemory(2**30)

    async def open(self, spec: TaskSpec) -> Preparation:
        task = build_task(spec)
        pool = await self.processes.open(spec)
        return Preparation("blk", task, self.room, pool, self.outcomes)

    async def __aenter__(self) -> "Bed":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.processes.close()


def job(number: int, *inputs: Tensor) -> WorkerJob:
    return WorkerJob(number, 1, TaskRequest(list(inputs), []), time.monotonic() + 60.0, lambda *_: None)


def image(file: bytes) -> Tensor:
    return Tensor("image", "BYTES", (1,), pack_bytes([file]))


async def test_jobs_are_prepared_and_finished():
    async with Bed() as bed:
        preparation, task = await bed.open(UPSCALE), build_task(UPSCALE)
        jobs = [job(number, image(photo)) for number, photo in enumerate(photos())]
        for each in jobs:
            preparation.prepare(each)
        for _ in jobs:
            each, prepared = await bed.prepared.get()
            assert isinstance(prepared, Prepared)
            each.prepared = prepared
            each.results = [(piece.arrays["x"],) for piece in prepared.pieces]
            preparation.finish(each)
        for _ in jobs:
            each, tensors = await bed.finished.get()
            local = task.prepare(each.request)
            (expected,) = task.finish(each.request, local, [found for found in each.results if found is not None])
            assert isinstance(tensors, list)
            assert [bytes(tensor.data) for tensor in tensors] == [expected.data]
            assert each.timing.finish_ns > 0


async def test_a_job_that_cannot_be_prepared_gets_its_error():
    async with Bed() as bed:
        preparation = await bed.open(UPSCALE)
        preparation.prepare(job(1, image(b"no image")))
        _, error = await bed.prepared.get()
        assert isinstance(error, PenstockError)
        assert error.code == "invalid_image"


async def test_quick_requests_are_prepared_on_the_loop():
    async with Bed() as bed:
        preparation = await bed.open(TENSOR)
        given = job(1, from_array("x", np.ones((1, 2), np.float32)))
        preparation.prepare(given)
        each, prepared = bed.prepared.get_nowait()  # it was not awaited
        assert isinstance(prepared, Prepared)
        each.prepared, each.results = prepared, [[np.ones((1, 2), np.float32)]]
        preparation.finish(each)
        assert bed.finished.qsize() == 1


async def test_a_few_of_many_simultaneous_short_texts_are_prepared_on_the_loop(tmp_path):
    Tokenizer(WordLevel({"fig": 0}, unk_token="fig")).save(str(tmp_path / "tokenizer.json"))
    tokens = tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask"))
    graph = Signature(tokens, (TensorSpec("sentence_embedding", "FP32", (-1, 4)),), "onnx", "fp32")
    outcomes = Outcomes()
    prepared = outcomes.of_prepare
    task = build_task(TaskSpec(tmp_path, ModelSettings(task="embed"), graph, Limits()))
    preparation = Preparation("blk", task, PreparedMemory(2**30), None, outcomes)
    short = [job(number, Tensor("text", "BYTES", (1,), pack_bytes(["a fig " * 80]))) for number in range(10)]
    long = job(10, Tensor("text", "BYTES", (1,), pack_bytes(["a fig " * 100])))
    for each in (long, *short):
        preparation.prepare(each)
    few = INLINE_BYTES_PER_TURN // 485  # each text with its length
    assert [prepared.get_nowait()[0] for _ in range(few)] == short[:few]
    assert prepared.empty()
    assert {(await prepared.get())[0].job_id for _ in range(11 - few)} == set(range(few, 11))
    preparation.prepare(short[0])
    assert prepared.get_nowait()[0] is short[0]
