"""Loads a version of a model into this process: engine, task, warm-up and memory measurement."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, cast

import psutil

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.signature import Signature
from penstock.engines.engine_protocols import AnyEngine, ContextEngine, Engine, EngineHome, GeneratingEngine, RowsEngine
from penstock.engines.huge_pages import use_huge_pages
from penstock.models.building import MODE_BY_ENGINE, RequestMode, TaskSpec, build_engine, build_task, takes_texts
from penstock.models.device_meter import DeviceMeter
from penstock.models.engine_choice.candidates import EngineChoice, choose_by_features
from penstock.models.folder import fingerprint_of, model_files, read_version, size_bytes
from penstock.models.model_yaml import AUTO, NETWORK_ENGINES, ModelSettings
from penstock.tasks.base import AnyTask, Task
from penstock.telemetry.freed_memory import return_freed_memory
from penstock.telemetry.gpus import Gpus

STEADY_BYTES = 4 * 1024 * 1024  # the cost of larger models is never considered steady


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A version of a model, ready to load: the model's file, the folder with the task's files, and the settings."""

    file: Path
    folder: Path
    settings: ModelSettings


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded version of a model: its engine and task. As a context manager, it closes the engine on exit."""

    spec: TaskSpec  # the data from which the task was built
    task: AnyTask
    engine: AnyEngine

    @property
    def request_mode(self) -> RequestMode:
        return MODE_BY_ENGINE.get(self.settings.engine, "batches")

    @property
    def batching(self) -> tuple[Task, Engine]:
        """Return the task and the engine of a model that runs batches or calls."""
        assert self.request_mode != "generations"
        return cast("Task", self.task), cast("Engine", self.engine)

    @property
    def context_engine(self) -> ContextEngine:
        assert self.request_mode == "calls"
        return cast("ContextEngine", self.engine)

    @property
    def generating_engine(self) -> GeneratingEngine:
        assert self.request_mode == "generations"
        return cast("GeneratingEngine", self.engine)

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


LoadWith = Callable[[ModelSettings], LoadedModel]  # loads the model with these settings, without warm-up
# Chooses the engine for a file with a fingerprint; returns the choice, and the model if a trial has loaded it.
ChooseEngine = Callable[[ModelFile, str, LoadWith], tuple[EngineChoice, LoadedModel | None]]


@dataclass(frozen=True, slots=True)
class LoadedBlock(LoadedModel):
    description: BlockDescription
    has_steady_cost: bool
    size_bytes: int = 0  # memory that loading took, at least the size of the files
    device_bytes: int = 0  # memory that loading took on the GPU, if known

    @property
    def computes_in_callers(self) -> bool:
        """Return whether the engine computes in the calling thread, instead of in threads of its own or on a GPU."""
        settings = self.settings
        return settings.engine == "onnx" and settings.instances.threads == 1 and self.description.device == "cpu"


def load_model(model: ModelFile, instances: int = 1, home: EngineHome | None = None) -> LoadedModel:
    """Load the model's main network, without a second network; raise ConfigError if that fails."""
    settings = choose_by_features(model.settings).settings
    engine = build_engine(model.file, settings, instances, home, has_second=False)
    return _load(engine, replace(model, settings=settings), Limits())


def _choose_by_features(model: ModelFile, *_: object) -> tuple[EngineChoice, None]:
    return choose_by_features(model.settings), None


def load_block(
    block_id: str,
    folder: Path,
    version: str,
    limits: Limits,
    home: EngineHome | None = None,
    gpus: Gpus | None = None,
    choose: ChooseEngine = _choose_by_features,
) -> LoadedBlock:
    """Load a block and warm up its engine; raise ConfigError if the load fails."""
    model = read_version(folder, version)
    settings, file = model.settings, model.file(version)
    files = model_files(model, version)
    fingerprint = fingerprint_of(model.path, files)
    model_file = ModelFile(file, model.path / version, settings)
    meter = DeviceMeter(gpus or Gpus())
    before_bytes: list[int] = []

    def load(settings: ModelSettings) -> LoadedModel:
        engine = build_engine(file, settings, settings.instance_count(), home)
        trim()  # otherwise, memory that was freed earlier would hide the memory that this model takes
        before_bytes.append(measure_memory_bytes())  # after the runtime was loaded, so that its memory does not count
        return _load(engine, replace(model_file, settings=settings), limits)

    choice, loaded = EngineChoice(settings), None
    if settings.engine == AUTO:
        choice, loaded = choose(model_file, fingerprint, load)
    loaded = loaded or load(choice.settings)
    settings = loaded.settings  # which include the defaults of the engine and the device
    _warm_up(loaded)
    trim()
    added_bytes = measure_memory_bytes() - before_bytes[0]
    use_huge_pages()  # after measuring, because this changes the memory of all models
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
    # The time of a batch is not predictable on a GPU, which may be shared, or in a model's own code.
    is_steady = signature.device == "cpu" and settings.engine in NETWORK_ENGINES and has_steady_cost(file)
    size = max(added_bytes, size_bytes(files))
    device_bytes = meter.taken_bytes(signature.device)
    return LoadedBlock(loaded.spec, loaded.task, loaded.engine, description, is_steady, size, device_bytes)


def _load(engine: AnyEngine, model: ModelFile, limits: Limits) -> LoadedModel:
    try:
        signature = engine.load()
        settings = model.settings.on_device(signature.device, takes_texts(model.settings, signature))
        spec = TaskSpec(model.folder, settings, signature, limits)
        return LoadedModel(spec, build_task(spec), engine)
    except BaseException:
        engine.close()
        raise


def _warm_up(loaded: LoadedModel) -> None:
    settings = loaded.settings
    if not settings.warm_up or loaded.request_mode == "generations":  # an engine that generates text warms up by itself
        return
    task, engine = loaded.batching
    try:
        if isinstance(engine, RowsEngine) and takes_texts(settings, loaded.signature):
            engine.prepare_rows(settings.batching.max_rows, settings.max_length, settings.batching.max_tokens)
        for inputs in task.warm_up_inputs():
            engine.warm_up(inputs)
    except BaseException:
        engine.close()
        raise


def has_steady_cost(file: Path) -> bool:
    """Return whether a run's time depends only on the input's size: true for small models without loops or branches."""
    if file.stat().st_size > STEADY_BYTES:
        return False
    from penstock.engines.onnx.onnx_network import has_branches

    return not has_branches(file)


def measure_memory_bytes() -> int:
    """Return the memory that this process and its children use. This is slow: do not call it on the event loop."""
    this = psutil.Process()
    total = int(this.memory_info().rss)
    for child in this.children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_info().rss
    return total


def trim() -> None:
    """Return freed memory to the system. This takes milliseconds: do not call it on the event loop."""
    return_freed_memory()
