"""Builds a model's engine and task from its settings. Libraries are imported only when a model needs them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.core.plugins import ENGINES, load_plugin
from penstock.core.signature import Signature
from penstock.engines.engine_protocols import AnyEngine, Engine, EngineHome, EngineSpec, GeneratingEngine
from penstock.engines.tensorrt.shapes import ShapeLimits
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import AnyTask
from penstock.tasks.built_in import describe_task, load_description
from penstock.tasks.options import TextLimits
from penstock.telemetry.control_groups import count_usable_cores

# How a model's requests are passed to its engine: joined into batches, as single calls with a CallContext, or as text
# generations.
RequestMode = Literal["batches", "calls", "generations"]
MODE_BY_ENGINE: dict[str, RequestMode] = {
    "python": "calls",
    "genai": "generations",
}  # by engine; all others run batches


def build_engine(
    file: Path, settings: ModelSettings, instances: int, home: EngineHome | None = None, has_second: bool = True
) -> AnyEngine:
    """Build the engine for a model's file; raise ConfigError if the engine cannot load the file.

    `instances`: the number of sessions on the CPU; on a GPU, all instances use one session. `home`: the folder for
    files that the engine builds from the model. If `has_second` is False, the model's second network is not loaded.
    """
    asked = settings.instances
    spec = EngineSpec(file, settings.precision, asked.threads, instances, asked.device, home)
    if MODE_BY_ENGINE.get(settings.engine) == "generations":
        return _build_generating_engine(spec, settings)
    networks = describe_task(settings.task).networks(settings)
    files = network_files(file, settings) if has_second else [file]
    engines = [
        _build_engine(replace(spec, file=each, image=network.image), settings)
        for each, network in zip(files, networks, strict=False)
    ]
    if len(engines) == 1:
        return engines[0]
    from penstock.engines.two_networks import TwoNetworkEngine

    return TwoNetworkEngine(*engines)


def network_files(file: Path, settings: ModelSettings) -> list[Path]:
    """Return the model's file, and the file of the model's second network if the settings name one.

    Raise ConfigError if the second file does not exist.
    """
    files = [file]
    for network in describe_task(settings.task).networks(settings)[1:]:
        second = file.parent / network.file
        if not second.is_file():
            raise ConfigError(
                f"{network.setting}: {second} does not exist; add the file or remove the setting", file=str(second)
            )
        files.append(second)
    return files


def _build_engine(spec: EngineSpec, settings: ModelSettings) -> Engine:
    match settings.engine:
        case "onnx":
            from penstock.engines.onnx.onnx_engine import OnnxEngine

            return OnnxEngine(spec)
        case "openvino":
            from penstock.engines.openvino.openvino_engine import OpenVinoEngine

            return OpenVinoEngine(spec)
        case "torch":
            from penstock.engines.availability import require_package

            require_package("torch")
            from penstock.engines.torch.torch_engine import TorchEngine

            return TorchEngine(spec, settings.torch)
        case "tensorrt":
            from penstock.engines.tensorrt.tensorrt_engine import TensorRtEngine

            spec = replace(spec, instances=settings.instance_count("cuda"))
            return TensorRtEngine(spec, settings.tensorrt, shape_limits(settings), settings.timeouts.load_s)
        case "python":
            from penstock.engines.python.python_engine import PythonEngine

            timeouts = settings.timeouts
            return PythonEngine(spec, settings.python, hang_s=timeouts.request_s, load_s=timeouts.load_s)
    engine: Engine = load_plugin(ENGINES, settings.engine)(spec, settings)
    return engine


def _build_generating_engine(spec: EngineSpec, settings: ModelSettings) -> GeneratingEngine:
    from penstock.engines.genai.genai_engine import GenaiEngine, GenerationLimits

    timeouts, generate = settings.timeouts, settings.generate
    limits = GenerationLimits(None if generate.max_context == "auto" else generate.max_context, generate.max_running)
    if "threads" not in settings.instances.model_fields_set:
        spec = replace(spec, threads=count_usable_cores())
    return GenaiEngine(spec, settings.genai, limits, hang_s=timeouts.request_s, load_s=timeouts.load_s)


def shape_limits(settings: ModelSettings) -> ShapeLimits:
    """Return the size limits of the batches that the model's engine receives."""
    batching = settings.on_device("cuda", takes_texts(settings)).batching
    rows, tokens = batching.max_rows, batching.max_tokens or 0
    if settings.is_batched is False:
        rows = 0
    size = describe_task(settings.task).row_size(settings)
    if not size.tokens:
        # An image's tile counts as one token of a batch.
        return ShapeLimits(
            min(rows, tokens or rows) if size.side else rows, side=size.side, ranges=settings.tensorrt.shapes
        )
    return ShapeLimits(rows, tokens, size.tokens, size.side, settings.tensorrt.shapes)


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The data from which a worker or a task process builds a task: a TaskSource that can be pickled."""

    folder: Path  # the version's folder
    settings: ModelSettings
    signature: Signature  # which the engine read from the model's file
    limits: Limits

    @property
    def max_rows(self) -> int:
        return self.settings.batching.max_rows

    @property
    def text_limits(self) -> TextLimits:
        return TextLimits(self.max_rows, self.settings.batching.max_tokens, self.limits.max_tokens)

    @property
    def batched(self) -> bool | None:
        """Return whether the first dimension of tensors is a batch dimension; None if the model's file decides."""
        return None if self.settings.is_batched == "auto" else self.settings.is_batched


def takes_texts(settings: ModelSettings, signature: Signature | None = None) -> bool:
    """Return whether the model's task converts texts to token ids. If `signature` is None, only the settings decide."""
    return describe_task(settings.task).takes_texts(settings, signature)


def build_task(spec: TaskSpec) -> AnyTask:
    """Build the task; raise ConfigError if the model is not suitable for the task."""
    return load_description(spec.settings.task).build(spec)
