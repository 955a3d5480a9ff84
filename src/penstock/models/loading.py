"""From a model folder to a block that is ready to run: engine, task, warm-up."""

from dataclasses import dataclass
from pathlib import Path

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.settings import BlockSettings
from penstock.engines.base import Engine
from penstock.models.building import TaskSpec, build_engine, build_task
from penstock.models.memory import family_bytes, trim
from penstock.models.settings import ModelSettings
from penstock.models.survey import fingerprint_of, instance_count, model_files, read_version, size_bytes
from penstock.tasks.base import Task

STEADY_ENGINES = ("onnx", "openvino")
STEADY_BYTES = 4 * 1024 * 1024  # what takes longer to look through will not be quick


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    description: BlockDescription
    settings: ModelSettings
    task: Task
    engine: Engine
    has_steady_cost: bool
    size_bytes: int = 0  # what it added to the worker's memory, at least its files' size
    task_spec: TaskSpec | None = None  # what its task was made of


def load_block(block_id: str, folder: Path, version: str, limits: Limits) -> LoadedBlock:
    """Blocks for as long as the engine takes; raises ConfigError with what is wrong."""
    model = read_version(folder, version)
    settings = model.settings
    files = model_files(model, version)
    fingerprint = fingerprint_of(model.path, files)
    engine = build_engine(model.file(version), settings, instance_count(settings))
    trim()  # what others have freed must not hide what this one takes
    before_bytes = family_bytes()  # the engine's runtime is there by now, and is not the model's
    try:
        signature = engine.load()
        task_spec = TaskSpec(model.path / version, settings, signature, limits)
        task = build_task(task_spec)
        if settings.warm_up:
            for inputs in task.warm_up_inputs():
                engine.warm_up(inputs)
    except BaseException:
        engine.close()
        raise
    trim()
    added_bytes = family_bytes() - before_bytes
    description = BlockDescription(
        block_id=block_id,
        model=model.name,
        version=version,
        platform=signature.platform,
        precision=signature.precision,
        inputs=task.signature.inputs,
        outputs=task.signature.outputs,
        max_batch_size=task.signature.max_batch_size,
        instances=instance_count(settings, signature.device),
        settings=settings.for_block(),
        device=signature.device,
        fingerprint=fingerprint,
    )
    is_steady = _is_steady(settings, signature.device, model.file(version))
    return LoadedBlock(description, settings, task, engine, is_steady, max(added_bytes, size_bytes(files)), task_spec)


def _is_steady(settings: ModelSettings, device: str, file: Path) -> bool:
    """A GPU is shared, and a model's own code may do anything: how long a batch takes there is not known."""
    return device == "cpu" and settings.engine in STEADY_ENGINES and has_steady_cost(file)


def has_steady_cost(file: Path) -> bool:
    """Whether a small model's time follows from its input's size: it has no loops or branches.

    Their names stand in the file as protobuf writes a node's op_type: tag, length, name.
    """
    if file.stat().st_size > STEADY_BYTES:
        return False
    data = file.read_bytes()
    return not any(b"\x22" + bytes([len(name)]) + name in data for name in (b"Loop", b"If", b"Scan"))


def credits(settings: BlockSettings, instances: int) -> int:
    """Twice what the instances can hold: enough for like lengths to meet, the rest waits where it can go elsewhere."""
    return 2 * instances * settings.batching.max_rows
