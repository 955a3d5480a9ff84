"""Quantizes a model: converts candidates, compares them with the original, and publishes the best."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.engines.onnx.onnx_variants import find_weighted_nodes, weight_files
from penstock.models.convert.calibration_samples import Samples, collect_samples
from penstock.models.convert.fidelity import Fidelity, Reference
from penstock.models.convert.methods import Converter, Method, choose, method_of
from penstock.models.convert.publish import copy_other_files, create_staging_folder, original_of, publish, read_report
from penstock.models.convert.report import (
    FP32,
    ORIGINAL,
    Conversion,
    QuantizationOptions,
    QuantizationRun,
    build_report,
)
from penstock.models.convert.speed import REQUESTS, Speed, measure_speeds
from penstock.models.engine_choice.candidates import choose_by_features
from penstock.models.folder import ModelFolder
from penstock.models.loading import LoadedModel, ModelFile, load_model
from penstock.models.model_yaml import NETWORK_ENGINES
from penstock.models.settings_file import edit_settings
from penstock.tasks.built_in import load_description

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class QuantizationOutcome:
    """The outcome of a quantization: if nothing was published, `version` is empty and `refusal` has the reason."""

    report: Mapping[str, Any]
    version: str = ""
    refusal: str = ""


def quantize(
    folder: ModelFolder, options: QuantizationOptions, show_progress: Progress = lambda _: None
) -> QuantizationOutcome:
    version = options.version or folder.versions[-1]
    original = _find_original(folder, version)
    methods = choose(options.precision, options.method, original.file, original.settings)
    original = _use_comparison_engine(original)
    floor = (
        load_description(original.settings.task).comparison.floor
        if options.min_accuracy is None
        else options.min_accuracy
    )
    with create_staging_folder(folder.path) as staged, ExitStack() as loaded:
        show_progress(f"loading version {version}")
        settings = original.settings.model_copy(update={"precision": "fp32"})
        in_fp32 = loaded.enter_context(load_model(replace(original, settings=settings)))
        _check_file(original.file, in_fp32, options.precision, version)
        samples = collect_samples(original.settings.task, in_fp32.task, options.calibration)
        converter = Converter(original, in_fp32, samples, floor)
        candidates = [
            _try_to_convert(converter, method, staged / ".work" / method.name, show_progress) for method in methods
        ]
        candidates, speeds, served_in = _measure(candidates, original, in_fp32, samples, show_progress)
        chosen = _choose(candidates, speeds[ORIGINAL], floor)
        run = QuantizationRun(folder, version, options, floor, samples, original, candidates, speeds, served_in)
        report = build_report(run, chosen)
        if chosen is None:
            return QuantizationOutcome(report, refusal="; ".join(each.problem for each in candidates))
        assert chosen.fidelity is not None
        if chosen.fidelity.value < floor and not options.is_forced:
            return QuantizationOutcome(report, refusal=_explain_refusal(chosen.fidelity, floor, options, methods))
        show_progress("publishing")
        return QuantizationOutcome(report, version=_publish(folder, version, chosen, staged, report, options))


def publish_variant(folder: ModelFolder, version: str, engine: str, precision: str) -> str:
    """Convert a version to the engine and precision that tuning chose; publish it, and return its version number.

    If `version` was itself converted, convert its original. The accuracy is not checked.
    """
    options = QuantizationOptions(
        original_of(folder.path, version), precision, method_of(engine, precision).name, is_forced=True
    )
    outcome = quantize(folder, options)
    if not outcome.version:
        raise ConfigError(outcome.refusal)
    return outcome.version


def _find_original(folder: ModelFolder, version: str) -> ModelFile:
    """Return the file to convert, without loading the model; raise ConfigError if the file cannot be converted."""
    if not version.isdecimal() or not (folder.path / version).is_dir():
        known = sorted((child.name for child in folder.path.iterdir() if child.name.isdecimal()), key=int)
        raise ConfigError(f"{folder.path}: there is no version {version}; its versions are {', '.join(known)}")
    settings = folder.settings_of(version)
    if settings.engine not in NETWORK_ENGINES:
        raise ConfigError(
            f"{folder.name}: engine: {settings.engine} has no file that can be converted; export the model to ONNX "
            "and quantize that" + (" (torch.onnx.export; docs/torch-models.md)" if settings.engine == "torch" else "")
        )
    source = original_of(folder.path, version)
    if source != version:
        made = read_report(folder.path, version) or {}
        raise ConfigError(
            f"{folder.name}: version {version} is already {made.get('precision', 'converted')}, made from version "
            f"{source}; use --version {source}"
        )
    file = folder.file(version)
    if not file.is_file():
        raise ConfigError(f"{folder.path}: version {version} has no {settings.file}")
    weight_files(file)
    return ModelFile(file, folder.path / version, choose_by_features(settings).settings)


def _use_comparison_engine(original: ModelFile) -> ModelFile:
    """Return the model with an engine that can run here, to compare answers: ONNX Runtime on the CPU for TensorRT."""
    if original.settings.engine != "tensorrt":
        return original
    instances = original.settings.instances.model_copy(update={"device": "cpu"})
    return replace(original, settings=original.settings.model_copy(update={"engine": "onnx", "instances": instances}))


def _check_file(file: Path, loaded: LoadedModel, precision: str, version: str) -> None:
    found = loaded.signature.precision
    if found in ("int8", precision):
        raise ConfigError(f"version {version} is already {found}; quantize the version from which it was made")
    if precision == "int8" and file.suffix != ".xml" and not find_weighted_nodes(file):
        raise ConfigError(f"{file}: has nothing to quantize: no MatMul, Gemm or Conv with constant weights")


def _try_to_convert(converter: Converter, method: Method, folder: Path, show_progress: Progress) -> Conversion:
    try:
        file, recipe = converter.convert(method, folder, show_progress)
    except PenstockError as error:
        return Conversion(method, problem=error.message)
    return Conversion(method, file, recipe)


def _measure(
    candidates: Sequence[Conversion],
    original: ModelFile,
    in_fp32: LoadedModel,
    samples: Samples,
    show_progress: Progress,
) -> tuple[list[Conversion], dict[str, Speed], str]:
    """Measure the accuracy of all candidates, and then all speeds, also of the original as served and in FP32."""
    show_progress("answering with the original in FP32")
    reference = Reference(original.settings.task, in_fp32, samples)
    with ExitStack() as stack:
        served = stack.enter_context(load_model(original))
        models = {FP32: in_fp32}
        if served.signature.precision != in_fp32.signature.precision:
            models[ORIGINAL] = served
        found = [_measure_accuracy(each, reference, stack, models, show_progress) for each in candidates]
        speeds = measure_speeds(models, samples.pick_evenly(REQUESTS), show_progress)
        speeds.setdefault(ORIGINAL, speeds[FP32])
        timed = [replace(each, speed=speeds.get(each.method.name)) for each in found]
        return timed, speeds, served.signature.precision


def _measure_accuracy(
    candidate: Conversion,
    reference: Reference,
    stack: ExitStack,
    models: dict[str, LoadedModel],
    show_progress: Progress,
) -> Conversion:
    """Load the candidate into `models` and measure its accuracy; record an error as the candidate's problem."""
    if candidate.file is None:
        return candidate
    name = candidate.method.name
    show_progress(f"measuring accuracy: {name}")
    try:
        loaded = stack.enter_context(load_model(candidate.file))
        fidelity = reference.compare(loaded)
    except PenstockError as error:
        return replace(candidate, problem=f"{name}: {error.message}")
    models[name] = loaded
    return replace(candidate, fidelity=fidelity, precision=loaded.signature.precision)


def _choose(candidates: Sequence[Conversion], original: Speed, floor: float) -> Conversion | None:
    """Return the fastest candidate that is accurate enough, or the most accurate one if none is.

    Speeds are compared by `Speed.certain_gain`, in which noisy measurements count less.
    """
    ready = [each for each in candidates if each.fidelity and each.speed]
    above = [each for each in ready if each.fidelity and each.fidelity.value >= floor]
    if above:
        return max(above, key=lambda each: each.speed.certain_gain(original) if each.speed else 0.0)
    return max(ready, key=lambda each: each.fidelity.value if each.fidelity else 0.0, default=None)


def _explain_refusal(fidelity: Fidelity, floor: float, options: QuantizationOptions, methods: Sequence[Method]) -> str:
    unit = f" {fidelity.unit}" if fidelity.unit else ""
    result = (
        f"{fidelity.measure} {fidelity.value:.4f}{unit} is {floor - fidelity.value:.4f}{unit} below {floor:g}{unit}"
    )
    tried = {method.name for method in methods}
    advice = []
    if options.precision == "int8":
        others = [name for name in ("static", "openvino", "dynamic") if name not in tried]
        advice += [f"--method {' or '.join(others)}"] if others else []
        advice += ["--precision fp16"]
        if tried & {"static", "openvino"}:
            advice += ["--calibration with more of your own data"]
    advice += [f"--min-accuracy {fidelity.value:.3f} if that is enough", "--force"]
    return f"{result}; nothing was published. What else to try: {', '.join(advice)}"


def _publish(
    folder: ModelFolder,
    version: str,
    chosen: Conversion,
    staged: Path,
    report: Mapping[str, Any],
    options: QuantizationOptions,
) -> str:
    assert chosen.file is not None
    source = folder.file(version)
    for file in weight_files(chosen.file.file):
        file.rename(staged / file.name)
    shutil.rmtree(staged / ".work")
    weights = {file.name for file in weight_files(source)}
    copy_other_files(staged, folder, version, weights, chosen.method.settings(chosen.file.file.name))
    if options.has_to_keep_serving and folder.settings.versions == "latest":
        # Before publishing, so that a server that restarts in between does not serve the new version.
        edit_settings(folder.path / "model.yaml", {"versions": [int(folder.versions[-1])]})
    return publish(staged, folder.path, report)
