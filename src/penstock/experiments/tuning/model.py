"""The model that is tuned: what it is shipped as, what may be chosen, and a repository for each candidate."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.yaml_file import laid_over
from penstock.engines.availability import why_not
from penstock.engines.onnx.variants import weighted_nodes
from penstock.experiments.tuning.space import (
    Configuration,
    Space,
    Variant,
    budgets,
    delays,
    elsewhere,
    is_gpu,
    layouts,
    row_counts,
)
from penstock.experiments.variants import Variants, settings_problem, write_repository
from penstock.models.building import takes_texts
from penstock.models.convert.methods import method_of
from penstock.models.convert.publish import read_report
from penstock.models.engine_choice.candidates import choose_by_features
from penstock.models.folder import ModelFolder
from penstock.models.loading import ModelFile
from penstock.models.settings import ModelSettings
from penstock.telemetry.control_groups import usable_cores

ON_ONNX = (
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
ON_TORCH = (Variant("torch", "auto", "cuda"), Variant("torch", "auto"))
TEXT_INPUTS = {"text", "query", "passage"}
# What would hide the model's own speed from requests that repeat.
AS_MEASURED: dict[str, Any] = {"versions": "latest", "cache": {"enabled": False}, "residence": {"load": "eager"}}


class TuneModel:
    """`folder` has one version alone."""

    def __init__(self, folder: ModelFolder, variants: Variants) -> None:
        self.folder = replace(folder, settings=choose_by_features(folder.settings).settings)
        self.variants = variants  # of the repository that it is in

    @property
    def version(self) -> str:
        return self.folder.versions[-1]

    @property
    def is_converted(self) -> bool:
        return read_report(self.folder.path, self.version) is not None

    def shipped(self) -> Configuration:
        settings = self.folder.settings
        device = _device(settings)
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

    def space(self, inputs: set[str], under_way: int) -> tuple[Space, dict[Variant, str]]:
        """What may be chosen, and why each variant that is left out cannot run here.

        `under_way`: items of all callers' requests.
        """
        shipped = self.shipped()
        refused = {each: reason for each in self._conceivable() if (reason := self._why_not(each))}
        variants = [shipped.variant, *(each for each in self._conceivable() if each not in refused)]
        has_lengths, cores = bool(inputs & TEXT_INPUTS), usable_cores()
        is_both = len({is_gpu(each.device) for each in variants}) > 1
        space = Space(
            shipped,
            tuple(dict.fromkeys(variants)),
            layouts(cores, shipped.variant.device),
            budgets(shipped.max_tokens, has_lengths, under_way),
            row_counts(shipped.max_rows, has_lengths, under_way),
            delays(shipped.max_delay_ms),
            elsewhere(shipped, cores, has_lengths, under_way) if is_both else None,
        )
        if self.folder.settings.sessions.is_stateful:  # its sessions stay with one instance
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
        """The model's own with what the candidate changes laid over them."""
        found: dict[str, Any] = self.folder.settings.model_dump(mode="json", exclude_unset=True)
        for key, value in candidate.changes(self.shipped()).items():
            section, _, name = key.rpartition(".")
            (found.setdefault(section, {}) if section else found)[name] = value
        _, of_file = self.source(candidate.variant)
        # Where it runs, and with how many instances, is the candidate's own.
        return laid_over({**found, **of_file, "instances": found.get("instances", {})}, AS_MEASURED)

    def source(self, variant: Variant) -> tuple[Path, Mapping[str, Any]]:
        """Its file, and what settings say of it. Raises ConfigError where the file cannot be made."""
        is_shipped = variant == self.shipped().variant
        if variant.is_converted and not is_shipped:
            made = self.variants.in_precision(self.folder.name, variant.engine, variant.precision)
            return made, method_of(variant.engine, variant.precision).settings(made.name)
        own = self.folder.settings
        precision = own.precision if is_shipped else variant.precision
        return self.folder.file(self.version), {"engine": variant.engine, "precision": precision, "file": own.file}

    def _shipped_precision(self) -> str:
        """What `auto` comes to here, and what a converted file has in it."""
        settings = self.folder.settings
        if report := read_report(self.folder.path, self.version):
            return str(report.get("precision", settings.precision))
        if settings.precision != "auto" or settings.engine not in ("onnx", "openvino"):
            return settings.precision
        has_bf16 = settings.engine == "openvino" and why_not("openvino", "cpu", "bf16") is None
        return "bf16" if has_bf16 else "fp32"

    def _conceivable(self) -> tuple[Variant, ...]:
        settings = self.folder.settings
        is_onnx = settings.engine in ("onnx", "openvino") and settings.file.endswith(".onnx")
        found = ON_TORCH if settings.engine == "torch" else ON_ONNX if is_onnx and not self.is_converted else ()
        own = settings.instances.device
        if not own.startswith("cuda:"):
            return found
        return tuple(replace(each, device=own) if is_gpu(each.device) else each for each in found)  # the same GPU

    def _why_not(self, variant: Variant) -> str | None:
        shipped = self.shipped()
        if variant == shipped.variant:
            return None
        if reason := why_not(variant.engine, variant.device, variant.precision):
            return reason
        if variant.precision == "int8" and not weighted_nodes(self.folder.file(self.version)):
            return "it has nothing to quantize: no MatMul, Gemm or Conv with weights of its own"
        precision = "fp32" if variant.is_converted else variant.precision
        own = self.folder.settings.model_dump(exclude_unset=True)
        device = {**own.get("instances", {}), "device": variant.device}
        return settings_problem({**own, "engine": variant.engine, "precision": precision, "instances": device})


def _device(settings: ModelSettings) -> str:
    device = settings.instances.device
    if device != "auto":
        return device
    has_cuda = settings.engine in ("onnx", "torch") and why_not(settings.engine, "cuda", "fp32") is None
    return "cuda" if has_cuda else "cpu"
