"""From a model folder to a block that is ready to run: engine, task, warm-up."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.core.models import ModelFolder, ModelSettings, read_model_folder
from penstock.core.signature import Signature
from penstock.engines.base import Engine, EngineSpec
from penstock.tasks.base import Task

STEADY_BYTES = 4 * 1024 * 1024  # what takes longer to look through will not be quick


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    description: BlockDescription
    task: Task
    engine: Engine
    has_steady_cost: bool


def load_block(block_id: str, folder: Path, version: str, limits: Limits) -> LoadedBlock:
    """Blocks for as long as the engine takes; raises ConfigError with what is wrong."""
    model = read_model_folder(folder)
    if version not in model.versions:
        raise ConfigError(f"{folder}: version {version} is not there any more")
    settings = model.settings
    engine = _ENGINES[settings.engine](_engine_spec(model.file(version), settings))
    signature = engine.load()
    task = _TASKS[settings.task](model, version, signature, limits)
    if settings.warm_up:
        for inputs in task.warm_up_inputs():
            engine.warm_up(inputs)
    description = BlockDescription(
        block_id=block_id,
        model=model.name,
        version=version,
        platform=signature.platform,
        precision=signature.precision,
        inputs=task.signature.inputs,
        outputs=task.signature.outputs,
        max_batch_size=task.signature.max_batch_size,
        instances=settings.instances.resolved_count(signature.device),
        settings=settings,
        device=signature.device,
    )
    # A GPU is shared: how long a batch takes there depends on what else runs.
    is_steady = signature.device == "cpu" and has_steady_cost(model.file(version))
    return LoadedBlock(description, task, engine, is_steady)


def _engine_spec(file: Path, settings: ModelSettings) -> EngineSpec:
    """Its instances are the processor's: on a GPU all of them share one session, however many they are."""
    instances = settings.instances
    return EngineSpec(file, settings.precision, instances.threads, instances.resolved_count(), instances.device)


def has_steady_cost(file: Path) -> bool:
    """Whether a small model's time follows from its input's size: it has no loops or branches.

    Their names stand in the file as protobuf writes a node's op_type: tag, length, name.
    """
    if file.stat().st_size > STEADY_BYTES:
        return False
    data = file.read_bytes()
    return not any(b"\x22" + bytes([len(name)]) + name in data for name in (b"Loop", b"If", b"Scan"))


def credits(settings: ModelSettings, instances: int) -> int:
    """Twice what the instances can hold: enough for like lengths to meet, the rest waits where it can go elsewhere."""
    return 2 * instances * settings.batching.max_rows


# Each imports its runtime only when a model asks for it.


def _onnx(spec: EngineSpec) -> Engine:
    from penstock.engines.onnx import OnnxEngine

    return OnnxEngine(spec)


def _openvino(spec: EngineSpec) -> Engine:
    from penstock.engines.openvino import OpenVinoEngine

    return OpenVinoEngine(spec)


def _tensor(model: ModelFolder, version: str, signature: Signature, limits: Limits) -> Task:
    from penstock.tasks.tensor import TensorTask

    is_batched = None if model.settings.is_batched == "auto" else model.settings.is_batched
    return TensorTask(signature, model.settings.batching.max_rows, is_batched)


def _embed(model: ModelFolder, version: str, signature: Signature, limits: Limits) -> Task:
    from penstock.tasks.embed import EmbedTask

    settings = model.settings
    return EmbedTask(model.path / version, settings.embed, settings.batching.max_rows, signature, limits.max_tokens)


def _upscale(model: ModelFolder, version: str, signature: Signature, limits: Limits) -> Task:
    from penstock.tasks.upscale import UpscaleTask

    return UpscaleTask(model.settings.upscale, signature, model.settings.batching.max_rows)


_ENGINES: dict[str, Callable[[EngineSpec], Engine]] = {"onnx": _onnx, "openvino": _openvino}
_TASKS: dict[str, Callable[[ModelFolder, str, Signature, Limits], Task]] = {
    "tensor": _tensor,
    "embed": _embed,
    "upscale": _upscale,
}
