"""The runner of a block with real threads, and with engines whose behaviour the test scripts."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits, TelemetrySettings
from penstock.core.errors import DeviceOutOfMemory, EngineFailed, PenstockError
from penstock.core.signature import DeclaredTensor, Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, from_array, to_array
from penstock.engines.engine_options import PythonOptions
from penstock.engines.engine_protocols import CallContext
from penstock.models.building import TaskSpec
from penstock.models.loading import LoadedBlock
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import Piece, Prepared, TaskRequest
from penstock.tasks.tensor import TensorTask
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.residency.resident import make_runner
from penstock.worker.running.block_runner import QueueRunner, WorkerTools, now
from penstock.worker.running.preparation import PreparedMemory
from penstock.worker.worker_job import WorkerJob

MODEL = Signature((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),), "onnxruntime_onnx", "fp32")


class Doubler:
    """Doubles its input; fails on negative numbers and on too many rows; waits while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = 0  # calls
        self.batches: list[int] = []
        self.values: list[float] = []  # the first row of each batch
        self.threads: set[str] = set()
        self.most_rows = 2**30
        self.is_closed = False

    def load(self) -> Signature:
        return MODEL

    def warm_up(self, inputs: Mapping[str, Array]) -> None: ...

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        gate = self.gate
        self.entered += 1
        gate.wait(10)
        self.batches.append(len(inputs["x"]))
        self.values.append(float(inputs["x"][0, 0]))
        self.threads.add(threading.current_thread().name)
        if (inputs["x"] < 0).any():
            raise EngineFailed("negative")
        if len(inputs["x"]) > self.most_rows:
            raise DeviceOutOfMemory("cuda:0 is out of memory")
        return [inputs["x"] * 2]

    def close(self) -> None:
        self.is_closed = True


class Storyteller(Doubler):
    """A ContextEngine that returns 2x, or streams x answers. If x is negative, it fails after |x| answers."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[CallContext] = []
        self.story: list[str] = []  # calls to the model, in order
        self.made = 0  # answers
        self.stopped = threading.Event()  # set when any stream has ended
        self.problem = ""

    def infer_with(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> list[Array]:
        self.contexts.append(context)
        self.story.append(f"{'start ' if context.is_start else ''}{context.session_id} {context.seq_no}")
        return self.infer(instance, inputs, outputs)

    def stream(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> Iterator[list[Array]]:
        self.contexts.append(context)
        value = int(inputs["x"][0, 0])
        try:
            for number in range(abs(value)):
                self.gate.wait(10)
                self.made += 1
                yield [np.array([[number]], np.float32)]
            if value < 0:
                raise EngineFailed("the story has no end")
        finally:
            self.stopped.set()

    def end_session(self, session_id: str, reason: str) -> None:
        self.story.append(f"{session_id} {reason}")
        self.threads.add(threading.current_thread().name)

    def probe(self, instance: int) -> str:
        self.gate.wait(10)
        return self.problem


class RowsTask(TensorTask):
    """A task that makes a piece of each row of a request, and does not batch pieces."""

    def prepare(self, request: TaskRequest) -> Prepared:
        whole = super().prepare(request).pieces[0]
        rows = whole.arrays["x"]
        return Prepared([Piece({"x": rows[n : n + 1]}, key=object()) for n in range(whole.rows)])

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        return [from_array("y", np.concatenate([result[0] for result in results]))]


def python_settings(is_decoupled: bool = False, **sections: Any) -> ModelSettings:
    options = PythonOptions(
        inputs=(DeclaredTensor(name="x", datatype="FP32", shape=(-1, 1)),),
        outputs=(DeclaredTensor(name="y", datatype="FP32", shape=(-1, 1)),),
        is_decoupled=is_decoupled,
    )
    return ModelSettings(engine="python", python=options, **sections)


class Bed:
    def __init__(
        self,
        settings: ModelSettings,
        instances: int = 1,
        is_steady: bool = True,
        engine: Doubler | None = None,
        task: type[TensorTask] = TensorTask,
        signature: Signature = MODEL,
    ) -> None:
        self.engine = engine or Doubler()
        description = BlockDescription(
            "blk", "m", "1", "onnxruntime_onnx", "fp32", MODEL.inputs, MODEL.outputs, 8, instances, settings.for_block()
        )
        self.registry = CollectorRegistry()
        loaded = LoadedBlock(
            TaskSpec(Path("nowhere"), settings, signature, Limits()),
            task(MODEL, settings.batching.max_rows, None),
            self.engine,
            description,
            has_steady_cost=is_steady,
        )
        self.room = PreparedMemory(2**30)
        tools = WorkerTools(self.room, WorkerMetrics(self.registry), Traces(TelemetrySettings(), "test"))
        runner = make_runner(loaded, tools)
        assert isinstance(runner, QueueRunner)
        self.runner = runner
        self.answers: dict[int, list[Tensor] | PenstockError] = {}
        self.partials: dict[int, list[float]] = {}

    def send(
        self,
        job_id: int,
        *values: float,
        timeout_s: float = 30.0,
        queue_timeout_s: float = inf,
        **fields: Any,
    ) -> WorkerJob:
        request = TaskRequest([from_array("x", np.array([values], np.float32).T)], [])
        at = now()
        job = WorkerJob(
            job_id, 1, request, at + timeout_s, self.answered, queue_deadline=at + queue_timeout_s, **fields
        )
        self.runner.accept(job)
        return job

    def answered(self, job: WorkerJob, outcome: list[Tensor] | PenstockError, is_partial: bool = False) -> None:
        assert job.job_id not in self.answers, "no answer follows the last one"
        if is_partial:
            assert isinstance(outcome, list)
            self.partials.setdefault(job.job_id, []).append(float(to_array(outcome[0])[0, 0]))
        else:
            self.answers[job.job_id] = outcome

    async def wait(self, count: int) -> None:
        """Wait until `count` requests have got their last answer."""
        await until(lambda: len(self.answers) >= count)

    def value(self, job_id: int) -> float:
        outcome = self.answers[job_id]
        assert isinstance(outcome, list), outcome
        return float(to_array(outcome[0])[0, 0])

    def count(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(metric, {"model": "m", "version": "1", **labels}) or 0.0

    def close(self) -> None:
        self.engine.gate.set()
        self.runner.close()
