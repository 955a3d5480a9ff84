"""From a model's folder to a version that runs in this process: engine, task, warm-up, the memory that it takes."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.signature import Signature
from penstock.engines.base import Engine, EngineHome, RowsEngine
from penstock.engines.huge_pages import gather
from penstock.models.building import TaskSpec, build_engine, build_task, takes_texts
from penstock.models.device_meter import DeviceMeter
from penstock.models.engine_choice.candidates import EngineChoice, choose_by_features
from penstock.models.folder import fingerprint_of, model_files, read_version, size_bytes
from penstock.models.settings import AUTO, NETWORK_ENGINES, ModelSettings
from penstock.tasks.base import Task
from penstock.telemetry.devices import Gpus

STEADY_BYTES = 4 * 1024 * 1024  # what takes longer to look through will not be quick
# The C library keeps what was freed for itself unless it is asked; not all have this.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What can be loaded: a file, the folder with what its task needs, and settings that fit both."""

    file: Path
    folder: Path
    settings: ModelSettings


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A version's engine and task; as a context it closes the engine at its end."""

    spec: TaskSpec  # what its task was made of
    task: Task
    engine: Engine

    @property
    def signature(self) -> Signature:
        return self.spec.signature

    @property
    def settings(self) -> ModelSettings:
        return self.spec.settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


LoadWith = Callable[[ModelSettings], LoadedModel]  # not warmed up
# What `engine: auto` becomes for a file with this fingerprint; loaded, where that had to be found out.
ChooseEngine = Callable[[ModelFile, str, LoadWith], tuple[EngineChoice, LoadedModel | None]]


@dataclass(frozen=True, slots=True)
class LoadedBlock(LoadedModel):
    description: BlockDescription
    has_steady_cost: bool
    size_bytes: int = 0  # what it added to the worker's memory, at least its files' size
    device_bytes: int = 0  # what it took of its GPU's memory, where somebody can tell

    @property
    def computes_in_callers(self) -> bool:
        """Whether who calls the engine computes, and not a thread of the engine's or a device."""
        settings = self.settings
        return settings.engine == "onnx" and settings.instances.threads == 1 and self.description.device == "cpu"


def load_model(model: ModelFile, instances: int = 1, home: EngineHome | None = None) -> LoadedModel:
    """By its main file alone, without a second network beside it; raises ConfigError with what is wrong."""
    settings = choose_by_features(model.settings).settings
    alone = settings.model_copy(update={"upscale": settings.upscale.model_copy(update={"denoise": ""})})
    return _load(build_engine(model.file, alone, instances, home), replace(model, settings=settings), Limits())


def _by_features(model: ModelFile, *_: object) -> tuple[EngineChoice, None]:
    return choose_by_features(model.settings), None


def load_block(
    block_id: str,
    folder: Path,
    version: str,
    limits: Limits,
    home: EngineHome | None = None,
    gpus: Gpus | None = None,
    choose: ChooseEngine = _by_features,
) -> LoadedBlock:
    """Blocks for as long as the engine takes; raises ConfigError with what is wrong."""
    model = read_version(folder, version)
    settings, file = model.settings, model.file(version)
    files = model_files(model, version)
    fingerprint = fingerprint_of(model.path, files)
    model_file = ModelFile(file, model.path / version, settings)
    meter = DeviceMeter(gpus or Gpus())
    before_bytes: list[int] = []

    def load(settings: ModelSettings) -> LoadedModel:
        engine = build_engine(file, settings, settings.instance_count(), home)
        trim()  # what others have freed must not hide what this one takes
        before_bytes.append(family_bytes())  # the engine's runtime is there by now, and is not the model's
        return _load(engine, replace(model_file, settings=settings), limits)

    choice, loaded = EngineChoice(settings), None
    if settings.engine == AUTO:
        choice, loaded = choose(model_file, fingerprint, load)
    loaded = loaded or load(choice.settings)
    settings = loaded.settings  # with what its engine and its device ask for
    _warm_up(loaded)
    trim()
    added_bytes = family_bytes() - before_bytes[0]
    gather()  # fills gaps of all that is loaded, which is not this model's
    signature, seen = loaded.signature, loaded.task.signature
    description = BlockDescription(
        block_id=block_id,
        model=model.name,
        version=version,
        platform=signature.platform,
        precision=signature.precision,
        inputs=seen.inputs,
        outputs=seen.outputs,
        max_batch_size=seen.max_batch_size,
        instances=settings.instance_count(signature.device),
        settings=settings.for_block(),
        device=signature.device,
        fingerprint=fingerprint,
        note="; ".join(filter(None, (choice.note, signature.note))),
    )
    # A GPU is shared, and a model's own code may do anything: how long a batch takes there is not known.
    is_steady = signature.device == "cpu" and settings.engine in NETWORK_ENGINES and has_steady_cost(file)
    size = max(added_bytes, size_bytes(files))
    device_bytes = meter.taken_bytes(signature.device)
    return LoadedBlock(loaded.spec, loaded.task, loaded.engine, description, is_steady, size, device_bytes)


def _load(engine: Engine, model: ModelFile, limits: Limits) -> LoadedModel:
    try:
        signature = engine.load()
        settings = model.settings.on_device(signature.device, takes_texts(model.settings, signature))
        spec = TaskSpec(model.folder, settings, signature, limits)
        return LoadedModel(spec, build_task(spec), engine)
    except BaseException:
        engine.close()
        raise


def _warm_up(loaded: LoadedModel) -> None:
    engine, settings = loaded.engine, loaded.settings
    if not settings.warm_up:
        return
    try:
        if isinstance(engine, RowsEngine) and takes_texts(settings, loaded.signature):
            engine.prepare_rows(settings.batching.max_rows, settings.max_length, settings.batching.max_tokens)
        for inputs in loaded.task.warm_up_inputs():
            engine.warm_up(inputs)
    except BaseException:
        loaded.engine.close()
        raise


def has_steady_cost(file: Path) -> bool:
    """Whether a small model's time follows from its input's size: it has no loops or branches."""
    if file.stat().st_size > STEADY_BYTES:
        return False
    from penstock.engines.onnx.network import has_branches

    return not has_branches(file)


def family_bytes() -> int:
    """Memory of this process and of those that models run in. Looks at all processes: not for the event loop."""
    this = psutil.Process()
    total = int(this.memory_info().rss)
    for child in this.children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_info().rss
    return total


def trim() -> None:
    """Gives what was freed back to the system. Takes some milliseconds: not for the event loop."""
    if _TRIM is not None:
        _TRIM(0)
