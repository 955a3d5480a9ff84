"""The model to tune: its current ("shipped") configuration, and the candidates with their files and accuracy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.yaml_file import merge_settings
from penstock.engines.availability import explain_unsupported
from penstock.engines.onnx.onnx_variants import find_weighted_nodes
from penstock.experiments.tuning.record import VariantRecord
from penstock.experiments.tuning.space import (
    Configuration,
    Space,
    Variant,
    is_gpu,
    list_batch_budgets,
    list_delays,
    list_layouts,
    list_row_limits,
    plan_other_device,
)
from penstock.experiments.variants import Variants, find_settings_problem, write_repository
from penstock.models.building import takes_texts
from penstock.models.convert.calibration_samples import collect_samples
from penstock.models.convert.fidelity import Fidelity, Reference
from penstock.models.convert.methods import method_of
from penstock.models.convert.publish import read_report
from penstock.models.engine_choice.candidates import choose_by_features
from penstock.models.folder import ModelFolder
from penstock.models.loading import ModelFile, load_model
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.built_in import load_description
from penstock.tasks.comparison import AnswerComparison
from penstock.telemetry.control_groups import count_usable_cores

ONNX_VARIANTS = (
    Variant("openvino", "int8"),
    Variant("onnx", "int8"),
    Variant("openvino", "bf16"),
    Variant("openvino", "fp32"),
    Variant("onnx", "fp32"),
    Variant("onnx", "fp16", "cuda"),
    Variant("tensorrt", "fp16", "cuda"),
    Variant("tensorrt", "int8", "cuda"),
    Variant("onnx", "fp32", "cuda"),
    Variant("tensorrt", "fp32", "cuda"),
)
TORCH_VARIANTS = (Variant("torch", "auto", "cuda"), Variant("torch", "auto"))
TEXT_INPUTS = {"text", "query", "passage"}
SAMPLE_STEP = 2  # use every second sample that quantizing measures: accurate enough in half the time
# Settings for measuring: a cache would hide the model's speed because requests repeat.
MEASURING_SETTINGS: dict[str, Any] = {"versions": "latest", "cache": {"enabled": False}, "residence": {"load": "eager"}}


class TuneModel:
    """Prepares a model for tuning. `folder` contains only the version to tune."""

    def __init__(self, folder: ModelFolder, variants: Variants) -> None:
        self.folder = replace(folder, settings=choose_by_features(folder.settings).settings)
        self.variants = variants  # variants of the model's repository

    @property
    def version(self) -> str:
        return self.folder.versions[-1]

    @property
    def is_converted(self) -> bool:
        return read_report(self.folder.path, self.version) is not None

    def shipped(self) -> Configuration:
        settings = self.folder.settings
        device = _resolve_device(settings)
        batching = settings.on_device(device, takes_texts(settings)).batching
        return Configuration(
            settings.engine,
            self._shipped_precision(),
            device,
            settings.instance_count(device),
            settings.instances.threads,
            batching.max_tokens,
            batching.max_rows,
            batching.max_delay_ms,
        )

    def space(self, inputs: set[str], in_flight: int) -> tuple[Space, dict[Variant, str]]:
        """Return the candidates, and the reason for each variant that cannot run on this machine.

        `in_flight` is the number of items in the requests of all callers.
        """
        shipped = self.shipped()
        refused = {
            each: reason for each in self._list_possible_variants() if (reason := self._explain_unavailable(each))
        }
        variants = [shipped.variant, *(each for each in self._list_possible_variants() if each not in refused)]
        has_lengths, cores = bool(inputs & TEXT_INPUTS), count_usable_cores()
        is_both = len({is_gpu(each.device) for each in variants}) > 1
        space = Space(
            shipped,
            tuple(dict.fromkeys(variants)),
            list_layouts(cores, shipped.variant.device),
            list_batch_budgets(shipped.max_tokens, has_lengths, in_flight),
            list_row_limits(shipped.max_rows, has_lengths, in_flight),
            list_delays(shipped.max_delay_ms),
            plan_other_device(shipped, cores, has_lengths, in_flight) if is_both else None,
        )
        if self.folder.settings.sessions.is_stateful:  # a session stays with one instance
            space = Space(shipped, space.variants, (), (), (), space.delays_ms)
        return space, refused

    def write(self, candidate: Configuration, repository: Path) -> Path:
        source, (made, _) = self.folder.file(self.version), self.source(candidate.variant)
        return write_repository(repository, self.folder.name, source, made, self.settings(candidate))

    def file(self, variant: Variant) -> ModelFile:
        settings = ModelSettings.model_validate(self.settings(self.shipped().with_variant(variant)))
        file, _ = self.source(variant)
        return ModelFile(file, self.folder.path / self.version, settings)

    def settings(self, candidate: Configuration) -> dict[str, Any]:
        """Return the model's settings with the candidate's changes."""
        found: dict[str, Any] = self.folder.settings.model_dump(mode="json", exclude_unset=True)
        for key, value in candidate.changes(self.shipped()).items():
            section, _, name = key.rpartition(".")
            (found.setdefault(section, {}) if section else found)[name] = value
        _, of_file = self.source(candidate.variant)
        # The candidate sets the device and the number of instances, not its file.
        return merge_settings({**found, **of_file, "instances": found.get("instances", {})}, MEASURING_SETTINGS)

    def source(self, variant: Variant) -> tuple[Path, Mapping[str, Any]]:
        """Return a variant's file, and the settings for it. Raise ConfigError if the model cannot be converted."""
        is_shipped = variant == self.shipped().variant
        if variant.is_converted and not is_shipped:
            made = self.variants.in_precision(self.folder.name, variant.engine, variant.precision)
            return made, method_of(variant.engine, variant.precision).settings(made.name)
        own = self.folder.settings
        precision = own.precision if is_shipped else variant.precision
        return self.folder.file(self.version), {"engine": variant.engine, "precision": precision, "file": own.file}

    def _shipped_precision(self) -> str:
        """Return the precision of the shipped file; if the precision is `auto`, return its meaning on this machine."""
        settings = self.folder.settings
        if report := read_report(self.folder.path, self.version):
            return str(report.get("precision", settings.precision))
        if settings.precision != "auto" or settings.engine not in ("onnx", "openvino"):
            return settings.precision
        has_bf16 = settings.engine == "openvino" and explain_unsupported("openvino", "cpu", "bf16") is None
        return "bf16" if has_bf16 else "fp32"

    def _list_possible_variants(self) -> tuple[Variant, ...]:
        settings = self.folder.settings
        is_onnx = settings.engine in ("onnx", "openvino") and settings.file.endswith(".onnx")
        found = (
            TORCH_VARIANTS if settings.engine == "torch" else ONNX_VARIANTS if is_onnx and not self.is_converted else ()
        )
        own = settings.instances.device
        if not own.startswith("cuda:"):
            return found
        return tuple(
            replace(each, device=own) if is_gpu(each.device) else each for each in found
        )  # the shipped configuration's GPU

    def _explain_unavailable(self, variant: Variant) -> str | None:
        shipped = self.shipped()
        if variant == shipped.variant:
            return None
        if reason := explain_unsupported(variant.engine, variant.device, variant.precision):
            return reason
        if variant.precision == "int8" and not find_weighted_nodes(self.folder.file(self.version)):
            return "nothing to quantize: the network has no MatMul, Gemm or Conv with constant weights"
        precision = "fp32" if variant.is_converted else variant.precision
        own = self.folder.settings.model_dump(exclude_unset=True)
        device = {**own.get("instances", {}), "device": variant.device}
        return find_settings_problem({**own, "engine": variant.engine, "precision": precision, "instances": device})


def _resolve_device(settings: ModelSettings) -> str:
    device = settings.instances.device
    if device != "auto":
        return device
    has_cuda = settings.engine in ("onnx", "torch") and explain_unsupported(settings.engine, "cuda", "fp32") is None
    return "cuda" if has_cuda else "cpu"


def choose_min_accuracy(model: TuneModel, requested: float | None) -> tuple[AnswerComparison, float]:
    """Return the task's accuracy measure, and the requested or default minimum accuracy."""
    comparison = load_description(model.folder.settings.task).comparison
    return comparison, comparison.floor if requested is None else requested


def check_variants(
    model: TuneModel, variants: Sequence[Variant], requested: float | None, log: Callable[[str], None]
) -> dict[Variant, VariantRecord]:
    """Measure the accuracy of the variants.

    A single variant is measured only if a minimum accuracy is requested. For a converted model, return the accuracy
    that was measured when the model was converted.
    """
    shipped = model.shipped().variant
    _, floor = choose_min_accuracy(model, requested)
    if model.is_converted:
        return {shipped: _build_record(shipped, _read_reported_accuracy(model), floor)}
    if len(variants) < 2 and requested is None:
        return {each: VariantRecord(name=str(each)) for each in variants}
    original = Variant("torch" if shipped.engine == "torch" else "onnx", "fp32")
    log(f"computing the original's answers ({original})")
    try:
        with load_model(model.file(original)) as loaded:
            task = model.folder.settings.task
            samples = collect_samples(task, loaded.task, None)
            some = replace(samples, held_out=[group[::SAMPLE_STEP] for group in samples.held_out])
            reference = Reference(task, loaded, some)
    except PenstockError as error:
        problem = f"cannot measure the accuracy: {error.message}"
        return {each: VariantRecord(name=str(each), left_out="" if each == shipped else problem) for each in variants}
    return {each: _measure_accuracy(model, each, reference, floor, log) for each in variants}


def _measure_accuracy(
    model: TuneModel, variant: Variant, reference: Reference, floor: float, log: Callable[[str], None]
) -> VariantRecord:
    log(f"measuring the accuracy of {variant}")
    try:
        with load_model(model.file(variant)) as loaded:
            found = reference.compare(loaded)
    except ConfigError as error:
        return VariantRecord(name=str(variant), left_out=error.message)
    return _build_record(variant, found, floor)


def _build_record(variant: Variant, fidelity: Fidelity | None, floor: float) -> VariantRecord:
    if fidelity is None:
        return VariantRecord(name=str(variant))
    unit = f" {fidelity.unit}" if fidelity.unit else ""
    below = f"{fidelity.measure} {fidelity.value:g}{unit} is below {floor:g}{unit}" if fidelity.value < floor else ""
    return VariantRecord(
        name=str(variant), accuracy=fidelity.value, measure=fidelity.measure, unit=fidelity.unit, left_out=below
    )


def _read_reported_accuracy(model: TuneModel) -> Fidelity | None:
    """Return the accuracy from the version's conversion report, because the original model may no longer exist."""
    accuracy = (read_report(model.folder.path, model.version) or {}).get("accuracy")
    if not isinstance(accuracy, dict) or not isinstance(accuracy.get("value"), int | float):
        return None
    return Fidelity(
        str(accuracy.get("measure", "")), accuracy["value"], accuracy.get("samples", 0), unit=accuracy.get("unit", "")
    )
