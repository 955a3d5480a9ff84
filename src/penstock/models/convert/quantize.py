"""Quantizing a model: candidates are made, held against the original, and the best becomes a new version."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.engines.onnx.variants import weight_files, weighted_nodes
from penstock.models.convert.fidelity import Fidelity, Reference, rule_of
from penstock.models.convert.methods import Converter, Method, choose, method_of
from penstock.models.convert.publish import fill, original_of, publish, read_report, staging
from penstock.models.convert.report import FP32, ORIGINAL, Conversion, Order, QuantizationRun, build_report
from penstock.models.convert.samples import Samples, collect
from penstock.models.convert.speed import REQUESTS, Speed, take_turns
from penstock.models.engine_choice.candidates import choose_by_features
from penstock.models.folder import ModelFolder
from penstock.models.loading import LoadedModel, ModelFile, load_model
from penstock.models.settings import NETWORK_ENGINES
from penstock.models.settings_file import edit_settings

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Quantized:
    """`version` is empty where nothing was published, and `refusal` says why."""

    report: Mapping[str, Any]
    version: str = ""
    refusal: str = ""


def quantize(folder: ModelFolder, order: Order, tell: Tell = lambda _: None) -> Quantized:
    version = order.version or folder.versions[-1]
    original = _original(folder, version)
    methods = choose(order.precision, order.method, original.file, original.settings)
    original = _as_tried(original)
    floor = rule_of(original.settings.task).floor if order.min_accuracy is None else order.min_accuracy
    with staging(folder.path) as staged, ExitStack() as loaded:
        tell(f"loading version {version}")
        settings = original.settings.model_copy(update={"precision": "fp32"})
        in_fp32 = loaded.enter_context(load_model(replace(original, settings=settings)))
        _check_file(original.file, in_fp32, order.precision, version)
        samples = collect(original.settings.task, in_fp32.task, order.calibration)
        converter = Converter(original, in_fp32, samples, floor)
        candidates = [_convert(converter, method, staged / ".work" / method.name, tell) for method in methods]
        candidates, speeds, served_in = _measure(candidates, original, in_fp32, samples, tell)
        chosen = _choose(candidates, floor)
        run = QuantizationRun(folder, version, order, floor, samples, original, candidates, speeds, served_in)
        report = build_report(run, chosen)
        if chosen is None:
            return Quantized(report, refusal="; ".join(each.problem for each in candidates))
        assert chosen.fidelity is not None
        if chosen.fidelity.value < floor and not order.is_forced:
            return Quantized(report, refusal=_refusal(chosen.fidelity, floor, order, methods))
        tell("publishing")
        return Quantized(report, version=_publish(folder, version, chosen, staged, report, order))


def publish_variant(folder: ModelFolder, version: str, engine: str, precision: str) -> str:
    """Makes the variant that `Variants` makes of this version a version of its own, and returns its number.

    Of a version that was converted itself, it is that of its original. What it costs in accuracy is reported, not
    judged: the caller has an objective of its own.
    """
    order = Order(original_of(folder.path, version), precision, method_of(engine, precision).name, is_forced=True)
    outcome = quantize(folder, order)
    if not outcome.version:
        raise ConfigError(outcome.refusal)
    return outcome.version


def _original(folder: ModelFolder, version: str) -> ModelFile:
    """Refuses what cannot be converted before anything is loaded."""
    if not version.isdecimal() or not (folder.path / version).is_dir():
        known = sorted((child.name for child in folder.path.iterdir() if child.name.isdecimal()), key=int)
        raise ConfigError(f"{folder.path}: has no version {version}; it has {', '.join(known)}")
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
            f"{folder.name}: version {version} is {made.get('precision', 'converted')} already, made of version "
            f"{source}; say --version {source}"
        )
    file = folder.file(version)
    if not file.is_file():
        raise ConfigError(f"{folder.path}: version {version} has no {settings.file}")
    weight_files(file)
    return ModelFile(file, folder.path / version, choose_by_features(settings).settings)


def _as_tried(original: ModelFile) -> ModelFile:
    """As it is loaded here to be held against: what runs on TensorRT answers the same on ONNX Runtime, on the CPU."""
    if original.settings.engine != "tensorrt":
        return original
    instances = original.settings.instances.model_copy(update={"device": "cpu"})
    return replace(original, settings=original.settings.model_copy(update={"engine": "onnx", "instances": instances}))


def _check_file(file: Path, loaded: LoadedModel, precision: str, version: str) -> None:
    found = loaded.signature.precision
    if found in ("int8", precision):
        raise ConfigError(f"version {version} is {found} already; quantize the version that it was made of")
    if precision == "int8" and file.suffix != ".xml" and not weighted_nodes(file):
        raise ConfigError(f"{file}: has nothing to quantize: no MatMul, Gemm or Conv with weights of its own")


def _convert(converter: Converter, method: Method, folder: Path, tell: Tell) -> Conversion:
    try:
        file, recipe = converter.convert(method, folder, tell)
    except PenstockError as error:
        return Conversion(method, problem=error.message)
    return Conversion(method, file, recipe)


def _measure(
    candidates: Sequence[Conversion], original: ModelFile, in_fp32: LoadedModel, samples: Samples, tell: Tell
) -> tuple[list[Conversion], dict[str, Speed], str]:
    """Accuracy one after another, speed in turns, with the original as it is served and in FP32."""
    tell("answering with the original in FP32")
    reference = Reference(original.settings.task, in_fp32, samples)
    with ExitStack() as stack:
        served = stack.enter_context(load_model(original))
        models = {FP32: in_fp32}
        if served.signature.precision != in_fp32.signature.precision:
            models[ORIGINAL] = served
        found = [_judge(each, reference, stack, models, tell) for each in candidates]
        speeds = take_turns(models, samples.in_turn(REQUESTS), tell)
        speeds.setdefault(ORIGINAL, speeds[FP32])
        timed = [replace(each, speed=speeds.get(each.method.name)) for each in found]
        return timed, speeds, served.signature.precision


def _judge(
    candidate: Conversion, reference: Reference, stack: ExitStack, models: dict[str, LoadedModel], tell: Tell
) -> Conversion:
    """Adds it to `models`, loaded; what is wrong with one candidate does not stop the others."""
    if candidate.file is None:
        return candidate
    name = candidate.method.name
    tell(f"measuring accuracy: {name}")
    try:
        loaded = stack.enter_context(load_model(candidate.file))
        fidelity = reference.compare(loaded)
    except PenstockError as error:
        return replace(candidate, problem=f"{name}: {error.message}")
    models[name] = loaded
    return replace(candidate, fidelity=fidelity, precision=loaded.signature.precision)


def _choose(candidates: Sequence[Conversion], floor: float) -> Conversion | None:
    """The fastest above the floor; where none is, the most accurate."""
    ready = [each for each in candidates if each.fidelity and each.speed]
    above = [each for each in ready if each.fidelity and each.fidelity.value >= floor]
    if above:
        return max(above, key=lambda each: each.speed.per_s if each.speed else 0.0)
    return max(ready, key=lambda each: each.fidelity.value if each.fidelity else 0.0, default=None)


def _refusal(fidelity: Fidelity, floor: float, order: Order, methods: Sequence[Method]) -> str:
    unit = f" {fidelity.unit}" if fidelity.unit else ""
    said = f"{fidelity.measure} {fidelity.value:.4f}{unit} is {floor - fidelity.value:.4f}{unit} below {floor:g}{unit}"
    tried = {method.name for method in methods}
    advice = []
    if order.precision == "int8":
        others = [name for name in ("static", "openvino", "dynamic") if name not in tried]
        advice += [f"--method {' or '.join(others)}"] if others else []
        advice += ["--precision fp16"]
        if tried & {"static", "openvino"}:
            advice += ["--calibration with more of your own data"]
    advice += [f"--min-accuracy {fidelity.value:.3f} if that is enough", "--force"]
    return f"{said}; nothing was published. What else to try: {', '.join(advice)}"


def _publish(
    folder: ModelFolder, version: str, chosen: Conversion, staged: Path, report: Mapping[str, Any], order: Order
) -> str:
    assert chosen.file is not None
    source = folder.file(version)
    for file in weight_files(chosen.file.file):
        file.rename(staged / file.name)
    shutil.rmtree(staged / ".work")
    weights = {file.name for file in weight_files(source)}
    fill(staged, folder, version, weights, chosen.method.settings(chosen.file.file.name))
    if order.has_to_keep_serving and folder.settings.versions == "latest":
        # Before the new version is there: no restart in between may find it.
        edit_settings(folder.path / "model.yaml", {"versions": [int(folder.versions[-1])]})
    return publish(staged, folder.path, report)
