"""From a model's settings to its engine and its task. Each imports its libraries only when a model asks for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.config import Limits
from penstock.core.plugins import ENGINES, TASKS, load_plugin
from penstock.core.signature import Signature
from penstock.engines.base import Engine, EngineSpec
from penstock.models.settings import ModelSettings
from penstock.tasks.base import Task


def build_engine(file: Path, settings: ModelSettings, instances: int) -> Engine:
    """`instances` are the processor's: on a GPU all of them share one session, however many they are."""
    asked = settings.instances
    spec = EngineSpec(file, settings.precision, asked.threads, instances, asked.device)
    factory = _ENGINES.get(settings.engine) or load_plugin(ENGINES, settings.engine)
    engine: Engine = factory(spec, settings)
    return engine


def _onnx(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.onnx.engine import OnnxEngine

    return OnnxEngine(spec)


def _openvino(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.openvino.engine import OpenVinoEngine

    return OpenVinoEngine(spec)


def _torch(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.torch.engine import TorchEngine

    return TorchEngine(spec, settings.torch)


def _python(spec: EngineSpec, settings: ModelSettings) -> Engine:
    from penstock.engines.python.engine import PythonEngine

    timeouts = settings.timeouts
    return PythonEngine(spec, settings.python, hang_s=timeouts.request_s, load_s=timeouts.load_s)


_ENGINES: Mapping[str, Callable[[EngineSpec, ModelSettings], Engine]] = {
    "onnx": _onnx,
    "openvino": _openvino,
    "torch": _torch,
    "python": _python,
}


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """All that a task is made of, in a worker or in one of its task processes."""

    folder: Path  # of the model's version
    settings: ModelSettings
    signature: Signature  # what the engine read from the model's file
    limits: Limits

    @property
    def max_rows(self) -> int:
        return self.settings.batching.max_rows

    @property
    def is_batched(self) -> bool | None:
        """None: as the file says."""
        return None if self.settings.is_batched == "auto" else self.settings.is_batched


def build_task(spec: TaskSpec) -> Task:
    """Raises ConfigError with what is wrong."""
    name = spec.settings.task
    factory = _TASKS.get(name) or load_plugin(TASKS, name)
    task: Task = factory(spec)
    return task


def _tensor(spec: TaskSpec) -> Task:
    from penstock.tasks.tensor import TensorTask

    is_batched = spec.is_batched
    if spec.settings.engine == "python" and is_batched is None:
        is_batched = False  # its requests are never joined, and it knows itself what its first dimension is
    return TensorTask(spec.signature, spec.max_rows, is_batched)


def _embed(spec: TaskSpec) -> Task:
    from penstock.tasks.embed import EmbedTask

    return EmbedTask(spec.folder, spec.settings.embed, spec.max_rows, spec.signature, spec.limits.max_tokens)


def _score(spec: TaskSpec) -> Task:
    from penstock.tasks.score import build_score_task

    return build_score_task(spec.folder, spec.settings.score, spec.max_rows, spec.signature, spec.limits.max_tokens)


def _classify(spec: TaskSpec) -> Task:
    from penstock.tasks.classify import ClassifyTask, RowLimits

    limits = RowLimits(spec.max_rows, spec.is_batched, spec.limits.max_tokens)
    return ClassifyTask(spec.folder, spec.settings.classify, limits, spec.signature)


def _upscale(spec: TaskSpec) -> Task:
    from penstock.tasks.upscale import UpscaleTask

    return UpscaleTask(spec.settings.upscale, spec.signature, spec.max_rows)


_TASKS: Mapping[str, Callable[[TaskSpec], Task]] = {
    "tensor": _tensor,
    "embed": _embed,
    "score": _score,
    "classify": _classify,
    "upscale": _upscale,
}
