"""From a model's settings to its task, in a worker or in one of its task processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.config import Limits
from penstock.core.plugins import TASKS, load_plugin
from penstock.core.signature import Signature
from penstock.models.settings import ModelSettings
from penstock.tasks.base import Task


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """All that a task is made of."""

    folder: Path  # of the model's version
    settings: ModelSettings
    signature: Signature  # what the engine read from the model's file
    limits: Limits


def build_task(spec: TaskSpec) -> Task:
    """Raises ConfigError with what is wrong."""
    name = spec.settings.task
    factory = _TASKS.get(name) or load_plugin(TASKS, name)
    task: Task = factory(spec)
    return task


# Each imports its libraries only when a model asks for it.


def _tensor(spec: TaskSpec) -> Task:
    from penstock.tasks.tensor import TensorTask

    settings = spec.settings
    is_batched = None if settings.is_batched == "auto" else settings.is_batched
    if settings.engine == "python" and is_batched is None:
        is_batched = False  # its requests are never joined, and it knows itself what its first dimension is
    return TensorTask(spec.signature, settings.batching.max_rows, is_batched)


def _embed(spec: TaskSpec) -> Task:
    from penstock.tasks.embed import EmbedTask

    settings = spec.settings
    max_rows, max_tokens = settings.batching.max_rows, spec.limits.max_tokens
    return EmbedTask(spec.folder, settings.embed, max_rows, spec.signature, max_tokens)


def _score(spec: TaskSpec) -> Task:
    from penstock.tasks.score import build_score_task

    settings = spec.settings
    max_rows, max_tokens = settings.batching.max_rows, spec.limits.max_tokens
    return build_score_task(spec.folder, settings.score, max_rows, spec.signature, max_tokens)


def _classify(spec: TaskSpec) -> Task:
    from penstock.tasks.classify import ClassifyTask

    return ClassifyTask(spec.folder, spec.settings, spec.signature, spec.limits.max_tokens)


def _upscale(spec: TaskSpec) -> Task:
    from penstock.tasks.upscale import UpscaleTask

    return UpscaleTask(spec.settings.upscale, spec.signature, spec.settings.batching.max_rows)


_TASKS: Mapping[str, Callable[[TaskSpec], Task]] = {
    "tensor": _tensor,
    "embed": _embed,
    "score": _score,
    "classify": _classify,
    "upscale": _upscale,
}
