"""An ONNX file becomes an engine: parsed, built strongly typed for its profiles, serialized. A GPU is not needed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec
from penstock.engines.onnx.network import read_precision, read_tensors
from penstock.engines.onnx.variants import weight_files
from penstock.engines.options import TensorRtOptions
from penstock.engines.tensorrt.kept import Facts
from penstock.engines.tensorrt.library import RTX, TensorRtLibrary
from penstock.engines.tensorrt.shapes import Profile, ShapeLimits, plan_profiles

FORMAT = 1  # counts up when what is built of the same file and options changes
TAKEN = ("BOOL", "UINT8", "INT8", "INT32", "INT64", "FP16", "BF16", "FP32")
OLDEST_RTX = 80  # compute capability times ten: older GPUs are Turing's, which it builds for alone
ANY = "any"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All that decides what the engine of a file will be."""

    file: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    profiles: tuple[Profile, ...]
    options: TensorRtOptions
    library: TensorRtLibrary
    device: str  # what it is built for: a GPU and its compute capability, or the capabilities

    def facts(self) -> Facts:
        """What it is kept by, as JSON has it."""
        return {
            "format": FORMAT,
            "model": digest_of(self.file),
            "device": self.device,
            "library": self.library.name,
            "library_version": self.library.version,
            "options": {
                "profiles": [
                    {name: [list(shape) for shape in shapes] for name, shapes in profile.items()}
                    for profile in self.profiles
                ],
                "optimization_level": self.options.optimization_level,
                "workspace_mb": self.options.workspace_mb,
            },
        }


def plan_engine(
    file: Path, limits: ShapeLimits, options: TensorRtOptions, library: TensorRtLibrary, gpu: str = ""
) -> EnginePlan:
    """`gpu`: the one that it is for, which only TensorRT must have at hand. Raises ConfigError."""
    if file.suffix != ".onnx":
        raise ConfigError(f"{file}: the tensorrt engine reads ONNX", file=str(file))
    inputs, outputs = read_tensors(file)
    for spec in (*inputs, *outputs):
        if spec.datatype not in TAKEN:
            raise ConfigError(
                f"{file}: '{spec.name}' is {spec.datatype}, which TensorRT does not take; use engine: onnx",
                reason="no_tensor",
                file=str(file),
            )
    if library.name == RTX:
        device = ",".join(sorted(options.capabilities, key=float)) or ANY
    else:
        if options.capabilities:
            raise ConfigError("tensorrt.capabilities is for TensorRT-RTX: TensorRT builds for the GPU that is here")
        device = gpu
    profiles = plan_profiles(inputs, limits)
    return EnginePlan(file, inputs, outputs, read_precision(file, inputs), profiles, options, library, device)


def digest_of(file: Path) -> str:
    """Of the file and of those beside it that hold its weights."""
    total = hashlib.sha256()
    for each in weight_files(file):
        with each.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()


def build_engine_file(plan: EnginePlan) -> bytes:
    """The serialized engine. Takes from a tenth of a second to many minutes; raises ConfigError with why it cannot."""
    library = plan.library
    trt, logger = library.module, library.logger
    library.said.clear()
    try:
        builder = trt.Builder(logger)
        network = builder.create_network(_flags(trt))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(plan.file)):
            raise _failure(plan, "cannot read it", _parser_errors(parser))
        built = builder.build_serialized_network(network, _configure(plan, builder))
    except ConfigError:
        raise
    except Exception as error:  # what the bindings raise is of no type of their own
        raise _failure(plan, "cannot build an engine of it", str(error)) from error
    if built is None:
        raise _failure(plan, "cannot build an engine of it", "")
    return bytes(built)


def _flags(trt: Any) -> int:
    """Strongly typed: what the file says is computed in, which later versions always do."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _configure(plan: EnginePlan, builder: Any) -> Any:
    trt, options = plan.library.module, plan.options
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # it has FP16's mantissa, and would run what says fp32
    config.builder_optimization_level = options.optimization_level
    if options.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb * 1024 * 1024)
    for each in plan.profiles:
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in each.items():
            profile.set_shape(name, least, best, most)
        config.add_optimization_profile(profile)
    if plan.library.name == RTX:
        targets = _targets(trt, plan.device)
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            config.set_compute_capability(target, index)
    return config


def _targets(trt: Any, device: str) -> list[Any]:
    """All of Ampere's and later, or those that are asked for."""
    known = {f"{number // 10}.{number % 10}": target for number, target in _capabilities(trt)}
    if device == ANY:
        return list(known.values())
    wanted = device.split(",")
    if unknown := [each for each in wanted if each not in known]:
        raise ConfigError(
            f"tensorrt.capabilities: TensorRT-RTX does not build for {unknown[0]}; it does for {', '.join(known)}"
        )
    return [known[each] for each in wanted]


def capabilities_of(library: TensorRtLibrary) -> tuple[str, ...]:
    """What GPUs TensorRT-RTX builds for."""
    return tuple(f"{number // 10}.{number % 10}" for number, _ in _capabilities(library.module))


def _capabilities(trt: Any) -> list[tuple[int, Any]]:
    found = [
        (int(name[2:]), target)
        for name, target in trt.ComputeCapability.__members__.items()
        if name.startswith("SM") and int(name[2:]) >= OLDEST_RTX
    ]
    return sorted(found, key=lambda each: each[0])


def _parser_errors(parser: Any) -> str:
    found: Sequence[Any] = [parser.get_error(index) for index in range(parser.num_errors)]
    return "; ".join(f"node {error.node()} ({error.node_operator()}): {error.desc()}" for error in found[:3])


def _failure(plan: EnginePlan, what: str, why: str) -> ConfigError:
    said = why or plan.library.last_words() or "it does not say why"
    if plan.precision == "int8":
        said += "; INT8 as it takes it is what 'penstock model quantize --method tensorrt' makes"
    return ConfigError(
        f"{plan.file}: {plan.library.title} {what}: {said}", reason="engine_not_built", file=str(plan.file)
    )
