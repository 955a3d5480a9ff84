"""The runner of a block that generates text, with an engine whose output the test scripts."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits, TelemetrySettings
from penstock.core.errors import PenstockError
from penstock.core.generation import Delta, Generation, GenerationState, GenerationStep, Progress
from penstock.core.signature import Signature
from penstock.core.tensors import Tensor, TensorSpec, from_array, to_array
from penstock.models.building import TaskSpec, build_task
from penstock.models.loading import LoadedBlock
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import TaskRequest
from penstock.tasks.options import GenerateOptions, SamplingDefaults
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.residency.resident import make_runner
from penstock.worker.running.block_runner import WorkerTools, now
from penstock.worker.running.generation_runner import GenerationRunner
from penstock.worker.running.preparation import PreparedMemory
from penstock.worker.worker_job import WorkerJob

CHAT = Signature((TensorSpec("messages", "BYTES", (1,)),), (), "openvino_genai", "int4")
NO_CHAT = Signature((), (), "openvino_genai", "int4")


class Scripted:
    """A GeneratingEngine whose steps are scripted by the test."""

    def __init__(self) -> None:
        self.added: dict[int, Generation] = {}
        self.cancelled: list[int] = []
        self.problem = ""
        self.is_closed = threading.Event()
        self._tell: Callable[[GenerationStep], None] = lambda step: None

    def load(self) -> Signature:
        return CHAT

    def close(self) -> None:
        self.is_closed.set()

    def start(self, tell: Callable[[GenerationStep], None]) -> None:
        self._tell = tell

    def add(self, number: int, generation: Generation) -> None:
        self.added[number] = generation

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def probe(self) -> str:
        return self.problem

    def step(self, *progress: Progress) -> None:
        """Report a step from another thread, as an engine would."""
        told = GenerationStep(progress, GenerationState(steps=1))
        thread = threading.Thread(target=self._tell, args=(told,))
        thread.start()
        thread.join()


def grown(
    number: int, text: str = "", finish: str = "", choice: int = 0, first: int = 0, is_over: bool = False
) -> Progress:
    """Return an engine step that adds one token to a choice. `first` is the number of tokens of the prompt."""
    delta = Delta(choice, text, [len(text)], [-0.5], finish, [text.encode()])
    return Progress(number, [delta], first, 0 if first else -1, is_over=is_over)


def request_of(text: str | Sequence[str] = "Once", outputs: Sequence[str] = (), **parameters: Any) -> TaskRequest:
    texts = np.array([text] if isinstance(text, str) else list(text), object)
    return TaskRequest([from_array("text_input", texts)], list(outputs), parameters)


def chat_of(messages: object, **parameters: Any) -> TaskRequest:
    said = np.array([json.dumps(messages)], object)
    return TaskRequest([from_array("messages", said)], [], parameters)


def found(tensors: Sequence[Tensor]) -> dict[str, list[Any]]:
    """Return outputs by name, with texts as strings."""
    lists = {tensor.name: to_array(tensor).tolist() for tensor in tensors}
    return {name: [v.decode() if isinstance(v, bytes) else v for v in values] for name, values in lists.items()}


def generate_settings(**sections: Any) -> ModelSettings:
    return ModelSettings(task="generate", engine="genai", **sections)


class GeneratingBed:
    def __init__(self, settings: ModelSettings | None = None) -> None:
        settings = settings or generate_settings(generate=GenerateOptions(defaults=SamplingDefaults(temperature=0.5)))
        self.engine = Scripted()
        spec = TaskSpec(Path("nowhere"), settings, CHAT, Limits())
        task = build_task(spec)
        seen = task.signature
        description = BlockDescription(
            "blk", "m", "1", "openvino_genai", "int4", seen.inputs, seen.outputs, 0, 1, settings.for_block()
        )
        self.registry = CollectorRegistry()
        tools = WorkerTools(PreparedMemory(2**30), WorkerMetrics(self.registry), Traces(TelemetrySettings(), "test"))
        loaded = LoadedBlock(spec, task, self.engine, description, has_steady_cost=False)
        runner = make_runner(loaded, tools)
        assert isinstance(runner, GenerationRunner)
        self.runner = runner
        self.ended: dict[int, dict[str, list[Any]] | PenstockError] = {}
        self.partials: dict[int, list[dict[str, list[Any]]]] = {}
        self.tokens: dict[int, list[object]] = {}

    def send(
        self, job_id: int, request: TaskRequest | None = None, timeout_s: float = 30.0, **fields: Any
    ) -> WorkerJob:
        job = WorkerJob(job_id, 1, request or request_of(), now() + timeout_s, self.answered, **fields)
        self.runner.accept(job)
        return job

    def answered(self, job: WorkerJob, outcome: list[Tensor] | PenstockError, is_partial: bool = False) -> None:
        assert job.job_id not in self.ended, "no answer follows the last one"
        if job.prepared is not None:
            self.tokens.setdefault(job.job_id, []).append(job.prepared.parameters.get("tokens"))
        if is_partial:
            assert isinstance(outcome, list)
            self.partials.setdefault(job.job_id, []).append(found(outcome))
        else:
            self.ended[job.job_id] = outcome if isinstance(outcome, PenstockError) else found(outcome)

    def texts(self, job_id: int) -> list[str]:
        return [answer["text_output"][0] for answer in self.partials.get(job_id, [])]
