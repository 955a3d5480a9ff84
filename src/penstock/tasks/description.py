"""The description of a task for other modules, which then need not know the names of tasks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from penstock.core.config import Limits
from penstock.core.requests import Parameter
from penstock.core.signature import ImageWork, Signature
from penstock.tasks.base import AnyTask
from penstock.tasks.comparison import AnswerComparison, compare_tensors
from penstock.tasks.options import TaskSettings, TextLimits

COMPARED_AS_TENSORS = AnswerComparison("mean cosine", 0.98, compare_tensors)
TENSOR_ENGINES = ("auto", "onnx", "openvino", "torch", "tensorrt")


class TaskSource(Protocol):
    """The data from which a worker or a task process builds a task."""

    @property
    def folder(self) -> Path:
        """Return the folder of the model's version."""
        ...

    @property
    def settings(self) -> TaskSettings: ...

    @property
    def signature(self) -> Signature:
        """Return the network's inputs and outputs, which the engine read from the model's file."""
        ...

    @property
    def limits(self) -> Limits: ...

    @property
    def max_rows(self) -> int: ...

    @property
    def text_limits(self) -> TextLimits: ...

    @property
    def batched(self) -> bool | None:
        """True if the first dimension of tensors is a batch dimension; None if the model's file decides."""
        ...


@dataclass(frozen=True, slots=True)
class Network:
    """A network of a model, and the image processing around the network that the engine may take over."""

    file: str
    image: ImageWork | None = None
    setting: str = "file"  # the key of model.yaml that names the file


@dataclass(frozen=True, slots=True)
class RowSize:
    """The largest size of a row in a batch; 0 means that the settings do not limit it."""

    tokens: int = 0  # of a text
    side: int = 0  # of an image, in pixels


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The names of files that a version needs beside the model's file; a name is empty if no such file is needed."""

    tokenizer: str = ""
    labels: str = ""


def _has_no_texts(settings: TaskSettings, signature: Signature | None) -> bool:
    return False


def _list_main_network(settings: TaskSettings) -> tuple[Network, ...]:
    return (Network(settings.file),)


def _unlimited_row_size(settings: TaskSettings) -> RowSize:
    return RowSize()


def _no_extra_files(settings: TaskSettings) -> TaskFiles:
    return TaskFiles()


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """A task, built in or from a package, as other modules see it. The defaults fit a task for any tensors."""

    name: str
    build: Callable[[TaskSource], AnyTask]  # raises ConfigError if the model does not fit the task

    # Used before the model is loaded. A package's task has the defaults, because its module is not imported yet.
    engines: tuple[str, ...] = TENSOR_ENGINES  # the built-in engines that can run the task
    takes_texts: Callable[[TaskSettings, Signature | None], bool] = (
        _has_no_texts  # whether the task converts texts to token ids
    )
    networks: Callable[[TaskSettings], tuple[Network, ...]] = _list_main_network
    row_size: Callable[[TaskSettings], RowSize] = _unlimited_row_size
    files: Callable[[TaskSettings], TaskFiles] = _no_extra_files
    max_running: Callable[[TaskSettings], int] | None = (
        None  # requests that one instance runs at once; None: the instance runs batches
    )
    experiment_data: str = "noop"  # the data of experiments that do not name any

    # Used after the model is loaded.
    comparison: AnswerComparison = COMPARED_AS_TENSORS
    has_real_samples: bool = True  # False: sample requests contain zeros, which a correct model may reject
    sample_parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    example: str = ""  # a command with {text}, {photo} and {model}; empty: `penstock infer` with the sample request
