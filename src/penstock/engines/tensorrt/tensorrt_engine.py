"""Runs ONNX files with TensorRT or TensorRT-RTX on an NVIDIA GPU; builds an engine, or reads it from the cache."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.signature import GPU_ROWS, Signature
from penstock.core.tensors import Array
from penstock.engines.engine_options import TensorRtOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.out_of_memory import as_out_of_memory
from penstock.engines.tensorrt.engine_build import EnginePlan, build_engine_file, list_capabilities, plan_engine
from penstock.engines.tensorrt.engine_cache import BuiltEngine, EngineCache
from penstock.engines.tensorrt.execution import GpuExecution
from penstock.engines.tensorrt.gpu import Gpu, open_gpu, to_gpu_error
from penstock.engines.tensorrt.library import RTX, TensorRtLibrary, find_library
from penstock.engines.tensorrt.shapes import ShapeLimits

PLATFORM = "tensorrt_plan"


class TensorRtEngine:
    """Runs a TensorRT engine that all instances share; each instance has a stream and buffers of its own."""

    def __init__(self, spec: EngineSpec, options: TensorRtOptions, limits: ShapeLimits, load_s: float) -> None:
        self._spec = spec
        self._options = options
        self._limits = limits
        self._cache = EngineCache(spec.home, load_s)
        self._plan: EnginePlan | None = None
        self._gpu: Gpu | None = None
        self._engine: Any = None
        self._executions: dict[int, GpuExecution] = {}  # by instance

    def load(self) -> Signature:
        library = find_library(self._options.library)
        self._gpu = gpu = open_gpu(self._spec.device)
        check_gpu(library, gpu)
        gpu.use()
        self._plan = plan = plan_engine(self._spec.file, self._limits, self._options, library, describe_gpu(gpu))
        built = self._open_engine(plan)
        device = "cuda" if self._spec.device == "auto" else self._spec.device
        note = describe_engine(library, built)
        return Signature(plan.inputs, plan.outputs, PLATFORM, plan.precision, device, note, GPU_ROWS)

    def _open_engine(self, plan: EnginePlan) -> BuiltEngine:
        """Open the engine.

        If the library rejects a cached engine, for example after a driver update, build it again.
        """
        facts = plan.facts()
        for is_forced in (False, True):
            built = self._cache.get(facts, lambda: build_engine_file(plan), is_forced=is_forced)
            plan.library.errors.clear()
            runtime = plan.library.module.Runtime(plan.library.logger)
            self._engine = runtime.deserialize_cuda_engine(built.data)
            if self._engine is not None:
                return built
            if built.is_new:
                break
        why = plan.library.first_errors() or "it gave no reason"
        if (lack := as_out_of_memory(why, self._spec.device)) is not None:
            raise lack
        raise ConfigError(
            f"{plan.file}: {plan.library.title} rejects the engine that it built: {why}",
            reason="engine_not_built",
            file=str(plan.file),
        )

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        for instance in range(self._spec.instances):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        assert self._plan is not None, "load the model first"
        assert self._gpu is not None
        try:
            lane = self._executions.get(instance)
            if lane is None:
                lane = self._executions[instance] = GpuExecution(self._engine, self._plan, self._gpu)
            return lane.run(inputs, outputs)
        except PenstockError:
            raise
        except Exception as error:
            raise to_gpu_error(f"TensorRT failed: {error}", self._gpu.device) from error

    def close(self) -> None:
        lanes, self._executions = self._executions, {}
        for lane in lanes.values():
            lane.close()
        self._engine = None


def check_gpu(library: TensorRtLibrary, gpu: Gpu) -> None:
    """Raise ConfigError if the GPU is too old for TensorRT-RTX."""
    if library.name != RTX or gpu.capability in (known := list_capabilities(library)):
        return
    raise ConfigError(
        f"engine: tensorrt: {library.title} runs on GPUs of compute capability {', '.join(known)}, but the "
        f"{gpu.name} has {gpu.capability}: install TensorRT, or use engine: onnx or torch with instances.device cuda",
        reason="device_missing",
    )


def describe_gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.capability}"


def describe_engine(library: TensorRtLibrary, built: BuiltEngine) -> str:
    """Return a sentence about the library and the engine's file, and whether the engine was cached."""
    what = f"{library.title}, engine {built.name or 'not kept on disk'}"
    return f"{what}, built in {built.build_s:.1f} s" if built.is_new else f"{what}, from the cache"
