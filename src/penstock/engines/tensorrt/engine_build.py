"""Builds a TensorRT engine from an ONNX file, for the input sizes in its profiles. TensorRT-RTX needs no GPU."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec
from penstock.engines.engine_options import TensorRtOptions
from penstock.engines.onnx.onnx_network import read_precision, read_tensors
from penstock.engines.onnx.onnx_variants import weight_files
from penstock.engines.tensorrt.engine_cache import Facts
from penstock.engines.tensorrt.library import RTX, TensorRtLibrary
from penstock.engines.tensorrt.shapes import Profile, ShapeLimits, plan_profiles

FORMAT = 1  # increase this number when a change of this module changes the engines that it builds
SUPPORTED = ("BOOL", "UINT8", "INT8", "INT32", "INT64", "FP16", "BF16", "FP32")
OLDEST_RTX = 80  # compute capability times ten; engines for Turing, the only older one, must be built separately
ANY = "any"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The file and all settings that determine the built engine."""

    file: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    profiles: tuple[Profile, ...]
    options: TensorRtOptions
    library: TensorRtLibrary
    device: str  # the GPU and its compute capability, or the capabilities, for which the engine is built

    def facts(self) -> Facts:
        """Return all properties on which the built engine depends, as JSON; they are its key in the engine cache."""
        return {
            "format": FORMAT,
            "model": compute_digest(self.file),
            "device": self.device,
            "library": self.library.name,
            "library_version": self.library.version,
            "options": {
                "profiles": [
                    {name: [list(shape) for shape in shapes] for name, shapes in profile.items()}
                    for profile in self.profiles
                ],
            },
        }


def plan_engine(
    file: Path, limits: ShapeLimits, options: TensorRtOptions, library: TensorRtLibrary, gpu: str = ""
) -> EnginePlan:
    """Return the plan of an engine; raise ConfigError if the file or an option is unsuitable.

    `gpu` is needed for TensorRT, but not for TensorRT-RTX.
    """
    if file.suffix != ".onnx":
        raise ConfigError(f"{file}: engine: tensorrt reads only ONNX: use an .onnx file", file=str(file))
    inputs, outputs = read_tensors(file)
    for spec in (*inputs, *outputs):
        if spec.datatype not in SUPPORTED:
            raise ConfigError(
                f"{file}: '{spec.name}' is {spec.datatype}, which TensorRT does not support; use engine: onnx",
                reason="no_tensor",
                file=str(file),
            )
    if library.name == RTX:
        device = ",".join(sorted(options.capabilities, key=float)) or ANY
    else:
        if options.capabilities:
            raise ConfigError("tensorrt.capabilities needs TensorRT-RTX: TensorRT builds only for this machine's GPU")
        device = gpu
    profiles = plan_profiles(inputs, limits)
    return EnginePlan(file, inputs, outputs, read_precision(file, inputs), profiles, options, library, device)


def compute_digest(file: Path) -> str:
    """Return a digest of the file and of the separate files with its weights."""
    total = hashlib.sha256()
    for each in weight_files(file):
        with each.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()


def build_engine_file(plan: EnginePlan) -> bytes:
    """Build and serialize the engine, which may take many minutes; raise ConfigError if it cannot be built."""
    library = plan.library
    trt, logger = library.module, library.logger
    library.errors.clear()
    try:
        builder = trt.Builder(logger)
        network = builder.create_network(_network_flags(trt))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(plan.file)):
            raise _build_error(plan, "cannot read it", _parser_errors(parser))
        built = builder.build_serialized_network(network, _make_build_config(plan, builder))
    except ConfigError:
        raise
    except Exception as error:  # the bindings have no exception type of their own
        raise _build_error(plan, "cannot build an engine from it", str(error)) from error
    if built is None:
        raise _build_error(plan, "cannot build an engine from it", "")
    return bytes(built)


def _network_flags(trt: Any) -> int:
    """Return TensorRT's flag for computing in the file's types, or 0 for newer versions, which always do so."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _make_build_config(plan: EnginePlan, builder: Any) -> Any:
    trt = plan.library.module
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # TF32 has only FP16's mantissa, so it must not replace fp32
    for each in plan.profiles:
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in each.items():
            profile.set_shape(name, least, best, most)
        config.add_optimization_profile(profile)
    if plan.library.name == RTX:
        targets = _target_capabilities(trt, plan.device)
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            config.set_compute_capability(target, index)
    return config


def _target_capabilities(trt: Any, device: str) -> list[Any]:
    """Return the GPU capabilities to build for: the requested ones, or all since Ampere."""
    known = {f"{number // 10}.{number % 10}": target for number, target in _known_capabilities(trt)}
    if device == ANY:
        return list(known.values())
    wanted = device.split(",")
    if unknown := [each for each in wanted if each not in known]:
        raise ConfigError(
            f"tensorrt.capabilities: TensorRT-RTX does not build for {unknown[0]}; use {', '.join(known)}"
        )
    return [known[each] for each in wanted]


def list_capabilities(library: TensorRtLibrary) -> tuple[str, ...]:
    return tuple(f"{number // 10}.{number % 10}" for number, _ in _known_capabilities(library.module))


def _known_capabilities(trt: Any) -> list[tuple[int, Any]]:
    found = [
        (int(name[2:]), target)
        for name, target in trt.ComputeCapability.__members__.items()
        if name.startswith("SM") and int(name[2:]) >= OLDEST_RTX
    ]
    return sorted(found, key=lambda each: each[0])


def _parser_errors(parser: Any) -> str:
    found: Sequence[Any] = [parser.get_error(index) for index in range(parser.num_errors)]
    return "; ".join(f"node {error.node()} ({error.node_operator()}): {error.desc()}" for error in found[:3])


def _build_error(plan: EnginePlan, failure: str, cause: str) -> ConfigError:
    reason = cause or plan.library.first_errors() or "it gave no reason"
    if plan.precision == "int8":
        reason += "; TensorRT needs INT8 files made by 'penstock model quantize --method tensorrt'"
    return ConfigError(
        f"{plan.file}: {plan.library.title} {failure}: {reason}", reason="engine_not_built", file=str(plan.file)
    )
