"""A model on disk: its model.yaml, its folder and its versions."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.core.errors import ConfigError
from penstock.core.plugins import ENGINES, TASKS, check_name
from penstock.core.yaml_file import Misfit, read_yaml, read_yaml_over

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
DEVICE = re.compile(r"^(auto|cpu|mps|cuda(:[0-9]{1,3})?)$")
Policy = Literal[
    "power_of_two",
    "round_robin",
    "random",
    "least_connections",
    "least_latency",
    "weighted",
    "hash",
    "locality",
]
DEFAULT_FILES = {"python": "model.py", "torch": "model.pt"}  # by engine; else model.onnx
VERSION_FILE = "version.yaml"  # in a version's folder: what differs there from model.yaml
MODEL_ONLY = ("task", "versions", "tags")  # what no version can have for itself
MAX_LISTED = 8  # names in a message
INSTANCES_ON_A_GPU = 4  # one computes while the others' batches are joined, copied and launched


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Batching(_Section):
    max_rows: Annotated[int, Field(ge=1, le=65536)] = 32
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # padded tokens in a batch; None: no budget
    max_delay_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 1024  # requests waiting in a gateway
    max_padding: Annotated[float, Field(ge=0, le=100)] = 0.05  # share of a batch's tokens that may be padding
    free_padding: Annotated[int, Field(ge=0)] = 8  # tokens of padding that cost less than one more batch
    reach_tokens: Annotated[int, Field(ge=1)] | None = None  # how far down the line a batch looks for its like
    order: Literal["length", "arrival"] = "length"


class Instances(_Section):
    count: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"  # auto: cores / threads; on a GPU 4
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    device: str = "cpu"  # auto, cpu, cuda, cuda:1, mps

    @field_validator("device")
    @classmethod
    def _is_known(cls, device: str) -> str:
        if not DEVICE.match(device):
            raise ValueError("must be auto, cpu, cuda, cuda:<number> or mps")
        return device

    def resolved_count(self, device: str = "cpu") -> int:
        """`device` is the one that runs the model: what `auto` became."""
        if self.count != "auto":
            return self.count
        if device != "cpu":
            return INSTANCES_ON_A_GPU
        return max(1, len(os.sched_getaffinity(0)) // self.threads)


class Routing(_Section):
    """Which worker takes a request."""

    policy: Policy = "power_of_two"
    key: str = ""  # the request parameter that is hashed; empty: the session
    without_key: Literal["any", "refuse"] = "any"  # what becomes of a request that has no key to hash


class Health(_Section):
    """When a worker gets no more requests of a block, and when it does again."""

    failures: Annotated[int, Field(ge=0)] = 5  # of the model or its worker, in a row; 0: never
    timeouts: Annotated[int, Field(ge=0)] = 5  # deadlines that passed while it ran requests, in a row; 0: never
    eject_s: Annotated[float, Field(gt=0, le=3600)] = 5.0  # until the first probe; doubles while probes fail
    eject_max_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    max_ejected: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of the block's workers; one always stays


class Caching(_Section):
    enabled: bool = False
    ttl_s: Annotated[float, Field(gt=0)] | None = None  # None: the server's response_cache.ttl_s


class Sessions(_Section):
    window: Annotated[int, Field(ge=1, le=65536)] = 64  # requests of a session that may wait for an earlier one
    answers: Annotated[int, Field(ge=0, le=65536)] = 64  # kept of each session, to be given again
    idle_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    max_sessions: Annotated[int, Field(ge=1)] = 100_000  # at a gateway
    is_stateful: bool = False  # the model keeps state: a session whose worker is gone has ended


class QueuePolicy(_Section):
    """Triton's ModelQueuePolicy."""

    on_timeout: Literal["reject", "delay"] = "reject"
    timeout_ms: Annotated[float, Field(ge=0)] = 0.0  # in the queue; 0: none
    allow_override: bool = False  # a request's own `timeout` may shorten it
    max_queue: Annotated[int, Field(ge=1)] | None = None  # requests of one level that wait; None: batching.max_queue


class Priorities(_Section):
    levels: Annotated[int, Field(ge=1, le=1000)] = 1  # 1 is the highest
    default: Annotated[int, Field(ge=1, le=1000)] = 1
    queue: QueuePolicy = QueuePolicy()
    by_level: dict[Annotated[int, Field(ge=1, le=1000)], QueuePolicy] = {}

    @model_validator(mode="after")
    def _are_levels(self) -> "Priorities":
        if wrong := [level for level in (self.default, *self.by_level) if level > self.levels]:
            raise ValueError(f"level {wrong[0]} is beyond levels: {self.levels}")
        return self

    def policy(self, level: int) -> QueuePolicy:
        return self.by_level.get(level, self.queue)


class Residence(_Section):
    """When a block's model is in its workers' memory."""

    load: Literal["eager", "lazy"] = "eager"  # lazy: with the first request
    idle_unload_s: Annotated[float, Field(ge=0)] = 0.0  # 0: stays
    max_waiting_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0  # what a request waits for a load at most


class Timeouts(_Section):
    request_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0  # where the client sets no deadline
    load_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0


class EmbedOptions(_Section):
    tokenizer: str = "tokenizer.json"
    max_length: Annotated[int, Field(ge=4, le=65536)] = 256  # longer texts are cut here, as the model's authors do
    output: str = "sentence_embedding"  # the graph's output that becomes `embedding`


class ScoreOptions(_Section):
    """How a query and a passage become a number."""

    method: Literal["auto", "cosine", "cross"] = "auto"  # auto: cosine where the graph gives vectors
    tokenizer: str = "tokenizer.json"
    max_length: Annotated[int, Field(ge=4, le=65536)] = 256  # of a text, or of a pair for a cross-encoder
    output: str = ""  # the graph's output; empty: sentence_embedding or logits
    activation: Literal["sigmoid", "none"] = "sigmoid"  # of a cross-encoder


class ClassifyOptions(_Section):
    """What becomes the graph's input, and what its output means."""

    input: Literal["auto", "image", "text", "tensor"] = "auto"  # auto: as the graph's inputs look
    labels: str = "labels.txt"  # one a line, in the order of the graph's output
    output: str = ""  # the graph's output; empty: its only one
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"
    top_k: Annotated[int, Field(ge=1, le=1000)] = 1  # labels in an answer, best first
    tokenizer: str = "tokenizer.json"
    max_length: Annotated[int, Field(ge=4, le=65536)] = 256
    size: Annotated[int, Field(ge=1, le=4096)] | None = None  # pixels along an image's side; None: as the graph says
    fit: Literal["crop", "stretch", "pad"] = "crop"
    colors: Literal["rgb", "bgr", "gray"] = "rgb"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # ImageNet's, of values from 0 to 1
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.229, 0.224, 0.225)
    max_pixels: Annotated[int, Field(ge=1)] = 25_000_000  # of an image that is sent


class UpscaleOptions(_Section):
    scale: Annotated[int, Field(ge=1, le=8)] = 2
    tile: Annotated[int, Field(ge=32, le=4096)] = 256  # pixels of output along a tile's side
    overlap: Annotated[int, Field(ge=0, le=256)] = 8  # at least the network's receptive field
    max_pixels: Annotated[int, Field(ge=1)] = 25_000_000  # of the input


class TensorOption(_Section):
    name: Annotated[str, Field(min_length=1)]
    datatype: str
    shape: tuple[int, ...]  # -1: any size


class PythonOptions(_Section):
    """What a Python model takes and gives."""

    class_name: str = "Model"
    inputs: tuple[TensorOption, ...] = ()
    outputs: tuple[TensorOption, ...] = ()
    is_decoupled: bool = False  # gives any number of answers to one request
    memory_mb: Annotated[int, Field(ge=64)] | Literal["auto", "none"] = "auto"  # of one instance; auto: see docs


class TorchOptions(_Section):
    """What a PyTorch file does not tell of itself."""

    inputs: tuple[TensorOption, ...] = ()  # in the order of its arguments; a TorchScript file needs them
    outputs: tuple[TensorOption, ...] = ()
    compile: bool = False  # torch.compile, which takes minutes with the first requests


class ModelSettings(_Section):
    """model.yaml."""

    task: str = "tensor"
    engine: str = "onnx"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    file: str = "model.onnx"
    description: str = ""
    tags: tuple[str, ...] = ()
    versions: Literal["latest", "all"] | tuple[Annotated[int, Field(ge=1)], ...] = "latest"
    is_idempotent: bool = True  # False: never run twice, not even when a worker dies
    is_batched: bool | Literal["auto"] = "auto"  # auto: the first dimension is a batch where the file leaves it open
    warm_up: bool = True
    placement: Literal["inline", "pool", "worker"] = "inline"  # where requests are prepared and answers finished
    batching: Batching = Batching()
    routing: Routing = Routing()
    health: Health = Health()
    cache: Caching = Caching()
    sessions: Sessions = Sessions()
    priorities: Priorities = Priorities()
    residence: Residence = Residence()
    instances: Instances = Instances()
    timeouts: Timeouts = Timeouts()
    embed: EmbedOptions = EmbedOptions()
    score: ScoreOptions = ScoreOptions()
    classify: ClassifyOptions = ClassifyOptions()
    upscale: UpscaleOptions = UpscaleOptions()
    python: PythonOptions = PythonOptions()
    torch: TorchOptions = TorchOptions()
    options: dict[str, Any] = {}  # of a task or an engine that another package brings

    @model_validator(mode="before")
    @classmethod
    def _names_the_file(cls, given: Any) -> Any:
        if isinstance(given, dict) and "file" not in given and given.get("engine") in DEFAULT_FILES:
            return {**given, "file": DEFAULT_FILES[given["engine"]]}
        return given

    @field_validator("task")
    @classmethod
    def _is_task(cls, name: str) -> str:
        return check_name(TASKS, name)

    @field_validator("engine")
    @classmethod
    def _is_engine(cls, name: str) -> str:
        return check_name(ENGINES, name)

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelSettings":
        if self.engine == "onnx" and self.precision == "bf16":
            message = "precision bf16 needs engine: openvino (ONNX Runtime has no BF16 kernels on CPU)"
            raise Misfit(message, "precision", "engine")
        if self.precision == "fp16" and self.engine in ("onnx", "openvino"):
            raise Misfit(
                "precision fp16 is a file's own here: penstock model quantize --precision fp16 makes one "
                "(engine: torch converts as it loads)",
                "precision",
                "engine",
            )
        if self.engine == "openvino" and self.instances.device not in ("auto", "cpu"):
            message = (
                f"instances.device {self.instances.device} needs engine: onnx or torch (OpenVINO serves on the CPU)"
            )
            raise Misfit(message, "instances.device", "engine")
        if self.engine == "python" and self.task != "tensor":
            raise Misfit("engine: python needs task: tensor", "engine", "task")
        if self.engine == "python" and not (self.python.inputs and self.python.outputs):
            message = "engine: python needs python.inputs and python.outputs: a Python file does not tell them"
            raise Misfit(message, "engine", "python.inputs", "python.outputs", "python", reason="python_tensors")
        if self.python.is_decoupled and self.engine != "python":
            raise Misfit("python.is_decoupled needs engine: python", "python.is_decoupled", "engine")
        if self.sessions.is_stateful and self.instances.count not in ("auto", 1):
            message = "sessions.is_stateful needs instances.count: 1 (more workers share the sessions)"
            raise Misfit(message, "sessions.is_stateful", "instances.count")
        if self.upscale.overlap * 2 >= self.upscale.tile:
            raise Misfit("upscale.overlap must be less than half of upscale.tile", "upscale.overlap", "upscale.tile")
        return self


@dataclass(frozen=True, slots=True)
class ModelFolder:
    name: str
    path: Path
    settings: ModelSettings
    versions: tuple[str, ...]  # those to serve, oldest first

    def settings_of(self, version: str) -> ModelSettings:
        """With what the version's own version.yaml lays over them."""
        return version_settings(self.path, version, self.settings)

    def of_version(self, version: str) -> "ModelFolder":
        """As if there were this version alone."""
        return ModelFolder(self.name, self.path, self.settings_of(version), (version,))

    def file(self, version: str) -> Path:
        return self.path / version / self.settings_of(version).file


def version_settings(folder: Path, version: str, settings: ModelSettings) -> ModelSettings:
    file = folder / version / VERSION_FILE
    if not file.is_file():
        return settings
    return read_yaml_over(file, folder / "model.yaml", ModelSettings, MODEL_ONLY)


def read_model_folder(path: Path) -> ModelFolder:
    name = path.name
    if not NAME.match(name):
        raise ConfigError(f"{path}: a model's name is letters, digits, '.', '_' and '-', at most 128", file=str(path))
    settings = read_yaml(path / "model.yaml", ModelSettings)
    try:
        versions = _versions(path, settings)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be read: {error.strerror}", file=str(path)) from error
    return ModelFolder(name, path, settings, tuple(str(version) for version in versions))


def _versions(path: Path, settings: ModelSettings) -> list[int]:
    """Those to serve."""
    found = sorted(int(child.name) for child in path.iterdir() if child.name.isdecimal() and child.is_dir())
    present = [version for version in found if version > 0 and _file(path, version, settings).is_file()]
    if settings.versions == "latest":
        chosen = present[-1:]
    elif settings.versions == "all":
        chosen = present
    else:
        chosen = [version for version in present if version in settings.versions]
        if missing := sorted(set(settings.versions) - set(present)):
            raise ConfigError(f"{path}: versions {missing} have no {settings.file}", file=str(path))
    if not chosen:
        raise ConfigError(
            f"{path}: no version to serve: expected {path.name}/1/{settings.file}, found {_contents(path)}"
            + ("; run 'penstock model import minilm'" if path.name == "minilm" else ""),
            file=str(path),
        )
    return chosen


def _file(folder: Path, version: int, settings: ModelSettings) -> Path:
    return folder / str(version) / version_settings(folder, str(version), settings).file


def _contents(folder: Path) -> str:
    """What lies in a model's folder beside its model.yaml, as much as fits into a message."""
    found = []
    for child in sorted(folder.iterdir()):
        if child.is_dir():
            found += [f"{child.name}/{inner.name}" for inner in sorted(child.iterdir())] or [f"{child.name}/ (empty)"]
        elif child.name != "model.yaml":
            found.append(child.name)
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return (", ".join(found[:MAX_LISTED]) + more) or "nothing beside model.yaml"


def list_model_folders(repository: Path) -> list[Path]:
    if not repository.is_dir():
        raise ConfigError(f"{repository}: no such model repository (a folder of model folders)", file=str(repository))
    return sorted(child for child in repository.iterdir() if _may_be_model(child))


def _may_be_model(child: Path) -> bool:
    """Also one that may not be looked into: whoever reads it then says so."""
    try:
        return (child / "model.yaml").is_file()
    except PermissionError:
        return True
