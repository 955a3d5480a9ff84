"""From a model's settings to its engine and its task. Each imports its libraries only when a model asks for it."""

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.core.plugins import ENGINES, TASKS, load_plugin
from penstock.core.signature import Signature
from penstock.engines.base import Engine, EngineHome, EngineSpec, ImageWork
from penstock.engines.tensorrt.shapes import ShapeLimits
from penstock.models.settings import ModelSettings
from penstock.tasks.base import Task
from penstock.tasks.network import has_text_inputs
from penstock.tasks.options import TextLimits
from penstock.telemetry.control_groups import usable_cores


def build_engine(file: Path, settings: ModelSettings, instances: int, home: EngineHome | None = None) -> Engine:
    """`instances` are the processor's: on a GPU all of them share one session, however many they are.

    `home` is where the engine may keep what it makes of the file.
    """
    asked, upscale = settings.instances, settings.upscale
    spec = EngineSpec(file, settings.precision, asked.threads, instances, asked.device, home)
    if settings.task != "upscale":
        return _build_engine(spec, settings)
    engine = _build_engine(replace(spec, image=ImageWork(upscale.scale, upscale.overlap)), settings)
    _, *others = network_files(file, settings)
    if not others:
        return engine
    from penstock.engines.paired import PairedEngine

    image = ImageWork(1, upscale.overlap, is_for_colors=True)
    return PairedEngine(engine, _build_engine(replace(spec, file=others[0], image=image), settings))


def network_files(file: Path, settings: ModelSettings) -> list[Path]:
    """The model's file, and that of the second network where it has one. Raises ConfigError where that is not there."""
    if settings.task != "upscale" or not settings.upscale.denoise:
        return [file]
    second = file.parent / settings.upscale.denoise
    if not second.is_file():
        raise ConfigError(
            f"upscale.denoise: there is no {second}; put it there, or take the setting out", file=str(second)
        )
    return [file, second]


def _build_engine(spec: EngineSpec, settings: ModelSettings) -> Engine:
    asked = settings.instances
    match settings.engine:
        case "onnx":
            from penstock.engines.onnx.engine import OnnxEngine

            return OnnxEngine(spec)
        case "openvino":
            from penstock.engines.openvino.engine import OpenVinoEngine

            return OpenVinoEngine(spec)
        case "torch":
            from penstock.engines.availability import require

            require("torch")
            from penstock.engines.torch.engine import TorchEngine

            return TorchEngine(spec, settings.torch)
        case "tensorrt":
            from penstock.engines.tensorrt.engine import TensorRtEngine

            spec = replace(spec, instances=settings.instance_count("cuda"))
            return TensorRtEngine(spec, settings.tensorrt, shape_limits(settings), settings.timeouts.load_s)
        case "python":
            from penstock.engines.python.engine import PythonEngine

            timeouts = settings.timeouts
            return PythonEngine(spec, settings.python, hang_s=timeouts.request_s, load_s=timeouts.load_s)
        case "genai":
            from penstock.engines.genai.engine import GenaiEngine, GenerationLimits

            timeouts, generate = settings.timeouts, settings.generate
            limits = GenerationLimits(
                None if generate.max_context == "auto" else generate.max_context, generate.max_running
            )
            if "threads" not in asked.model_fields_set:
                spec = replace(spec, threads=usable_cores())
            return GenaiEngine(spec, settings.genai, limits, hang_s=timeouts.request_s, load_s=timeouts.load_s)
    engine: Engine = load_plugin(ENGINES, settings.engine)(spec, settings)
    return engine


def shape_limits(settings: ModelSettings) -> ShapeLimits:
    """How large the batches may be that the engine of a model gets."""
    batching = settings.on_device("cuda", takes_texts(settings)).batching
    rows, tokens = batching.max_rows, batching.max_tokens or 0
    if settings.is_batched is False:
        rows = 0
    given = settings.tensorrt.shapes
    match settings.task:
        case "embed" | "score" | "classify":
            text = {"embed": settings.embed, "score": settings.score}.get(settings.task, settings.classify)
            return ShapeLimits(rows, tokens, text.max_length, settings.classify.size or 0, given)
        case "upscale":  # a tile counts as one token
            return ShapeLimits(min(rows, tokens or rows), side=settings.upscale.tile, given=given)
    return ShapeLimits(rows, given=given)


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
    def text_limits(self) -> TextLimits:
        return TextLimits(self.max_rows, self.settings.batching.max_tokens, self.limits.max_tokens)

    @property
    def batched(self) -> bool | None:
        """None: as the file says."""
        return None if self.settings.is_batched == "auto" else self.settings.is_batched


def takes_texts(settings: ModelSettings, signature: Signature | None = None) -> bool:
    """Whether the task makes the network's token ids of texts; without a signature, as far as its settings tell."""
    if settings.task == "classify" and settings.classify.input == "auto":
        return signature is not None and settings.engine != "tensorrt" and has_text_inputs(signature)
    return settings.task in ("embed", "score") or (settings.task == "classify" and settings.classify.input == "text")


def build_task(spec: TaskSpec) -> Task:
    """Raises ConfigError with what is wrong."""
    settings, signature = spec.settings, spec.signature
    match settings.task:
        case "tensor":
            from penstock.tasks.tensor import TensorTask

            # A Python model's requests are never joined, and it knows itself what its first dimension is.
            is_batched = False if settings.engine == "python" and spec.batched is None else spec.batched
            return TensorTask(signature, spec.max_rows, is_batched, spec.limits.max_elements)
        case "embed":
            from penstock.tasks.embed import EmbedTask

            return EmbedTask(spec.folder, settings.embed, signature, spec.text_limits)
        case "score":
            from penstock.tasks.score import build_score_task

            return build_score_task(spec.folder, settings.score, signature, spec.text_limits)
        case "classify":
            from penstock.tasks.classify import ClassifyTask, RowLimits

            limits = RowLimits(spec.max_rows, spec.batched, spec.limits.max_elements, spec.text_limits)
            return ClassifyTask(spec.folder, settings.classify, limits, signature)
        case "upscale":
            from penstock.tasks.upscale import UpscaleTask

            return UpscaleTask(settings.upscale, signature, spec.max_rows)
        case "generate":
            from penstock.tasks.generate.task import GenerateTask

            return GenerateTask(settings.generate, signature)
    task: Task = load_plugin(TASKS, settings.task)(spec)
    return task
