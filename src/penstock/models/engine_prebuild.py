"""Builds a model's TensorRT engines before a worker loads the model, for `penstock model build`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from penstock.core.errors import ConfigError
from penstock.engines.engine_protocols import EngineHome
from penstock.engines.tensorrt.engine_build import EnginePlan, build_engine_file, plan_engine
from penstock.engines.tensorrt.engine_cache import BuiltEngine, EngineCache
from penstock.engines.tensorrt.gpu import open_gpu
from penstock.engines.tensorrt.library import RTX, find_library
from penstock.engines.tensorrt.tensorrt_engine import check_gpu, describe_gpu
from penstock.models.building import network_files, shape_limits
from penstock.models.folder import ModelFolder
from penstock.models.model_yaml import ModelSettings


@dataclass(frozen=True, slots=True)
class PrebuiltEngine:
    version: str
    plan: EnginePlan
    built: BuiltEngine


def can_prebuild(settings: ModelSettings) -> bool:
    return settings.engine == "tensorrt"


def prebuild_engines(
    folder: ModelFolder, version: str, home: EngineHome, *, is_forced: bool = False
) -> Iterator[PrebuiltEngine]:
    """Build and store the TensorRT engine of each of the model's networks; raise ConfigError if a build fails."""
    settings = folder.settings_of(version)
    if not can_prebuild(settings):
        raise ConfigError(
            f"{folder.name}: version {version} has engine: {settings.engine}, which needs no build: "
            "only models with engine: tensorrt can be built"
        )
    library = find_library(settings.tensorrt.library)
    gpu = ""
    if library.name != RTX:  # TensorRT measures its kernels on the GPU that it builds for
        found = open_gpu(settings.instances.device)
        check_gpu(library, found)
        found.use()
        gpu = describe_gpu(found)
    kept = EngineCache(home, settings.timeouts.load_s)
    for file in network_files(folder.file(version), settings):
        plan = plan_engine(file, shape_limits(settings), settings.tensorrt, library, gpu)
        build = partial(build_engine_file, plan)
        yield PrebuiltEngine(version, plan, kept.get(plan.facts(), build, is_forced=is_forced))
