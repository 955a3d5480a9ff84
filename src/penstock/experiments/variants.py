"""Prepare the model of a case for serving: the model's file in the requested precision, and model.yaml."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.core.error_text import describe_first_problem
from penstock.core.errors import ConfigError
from penstock.core.yaml_file import merge_settings
from penstock.engines.availability import explain_unreadable, explain_unsupported
from penstock.engines.onnx import onnx_variants
from penstock.engines.onnx.onnx_variants import weight_files
from penstock.engines.openvino import openvino_variants
from penstock.experiments.experiment import Case
from penstock.models.convert.calibration_samples import collect_samples
from penstock.models.convert.methods import CONVERTED, Converter, explain_unsuitable, method_of
from penstock.models.convert.publish import OWN, original_of
from penstock.models.engine_choice.candidates import choose_by_features
from penstock.models.folder import ModelFolder, read_model_folder
from penstock.models.loading import ModelFile, load_model
from penstock.models.model_yaml import ModelSettings
from penstock.models.samples.noop import NOOP, write_noop
from penstock.tasks.built_in import describe_task

RECIPES = {
    "onnx": onnx_variants.RECIPE,
    "openvino": openvino_variants.RECIPE,
    "tensorrt": onnx_variants.RECIPE,
}


class Variants:
    """Converts the models of a repository to variants. Stores converted files in `cache` by the source's digest."""

    def __init__(self, models: Path, cache: Path) -> None:
        self._models = models
        self._cache = cache
        self._digests: dict[str, str] = {}

    def folder(self, model: str) -> ModelFolder:
        path = self._models / model
        if model == NOOP and not path.exists():
            path = write_noop(self._cache / NOOP)
        if not (path / "model.yaml").is_file():
            raise ConfigError(f"{path}: no such model; give the model repository with --models")
        return read_model_folder(path)

    def engine_of(self, model: str) -> str:
        return choose_by_features(self.folder(model).settings).settings.engine

    def data_of(self, model: str) -> str:
        return describe_task(self.folder(model).settings.task).experiment_data

    def version_of(self, model: str) -> str:
        """Return the newest version, or its original if it is quantized, because cases convert models themselves."""
        folder = self.folder(model)
        return original_of(folder.path, folder.versions[-1])

    def file(self, model: str) -> Path:
        return self.folder(model).file(self.version_of(model))

    def original(self, model: str) -> ModelFile:
        """Return the model's original file with settings for FP32 on the CPU."""
        file = self.file(model)
        settings = self.folder(model).settings_of(file.parent.name)
        instances = settings.instances.model_copy(update={"device": "cpu"})
        engine = "onnx" if file.suffix == ".onnx" else choose_by_features(settings).settings.engine
        changes = {"engine": engine, "precision": "fp32", "instances": instances}
        return ModelFile(file, file.parent, settings.model_copy(update=changes))

    def digest(self, model: str) -> str:
        """Return a digest of all files of the version, including the tokenizer, which affects calibration."""
        if model not in self._digests:
            total = hashlib.sha256()
            for file in sorted(self.file(model).parent.iterdir()):
                if file.is_file() and not file.name.startswith(".") and file.name not in OWN:
                    with file.open("rb") as stream:
                        total.update(file.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
            self._digests[model] = total.hexdigest()
        return self._digests[model]

    def why_not(self, case: Case) -> str | None:
        """Return why this machine cannot run the case, or None if the machine can."""
        reason = explain_unreadable(case.engine, self.file(case.model)) or explain_unsupported(
            case.engine, case.device, case.precision
        )
        if reason:
            return reason
        if case.is_text and case.batch_size != 1:
            return "a request has exactly one prompt: set batch_sizes: [1]"
        if _needs_conversion(case.engine, case.precision):
            method = method_of(case.engine, case.precision)
            settings = self.folder(case.model).settings_of(self.version_of(case.model))
            if reason := explain_unsuitable(method, self.file(case.model), settings):
                return reason
        return find_settings_problem(self.settings(case))

    def settings(self, case: Case) -> dict[str, Any]:
        """Return the case's model.yaml: the model's settings, overridden by the settings of the case."""
        own = yaml.safe_load((self.folder(case.model).path / "model.yaml").read_text()) or {}
        source = self.file(case.model)
        file = {"engine": case.engine, "precision": case.precision, "file": source.name}
        if _needs_conversion(case.engine, case.precision):
            method = method_of(case.engine, case.precision)
            file = method.settings(method.file_name(source))
        instances = {"count": case.instances, "threads": case.threads, "device": case.device}
        given = {key: value for key, value in instances.items() if value is not None}
        laid = {**file, "versions": "latest", "batching": case.batching, "instances": given}
        return merge_settings(own, {**laid, "residence": {"load": "eager"}})  # loading is not measured

    def build_repository(self, case: Case, target: Path) -> Path:
        made = self.in_precision(case.model, case.engine, case.precision)
        return write_repository(target, case.model, self.file(case.model), made, self.settings(case))

    def in_precision(self, model: str, engine: str, precision: str) -> Path:
        """Return the model's file for an engine and precision; convert the model on the first call."""
        source = self.file(model)
        if not _needs_conversion(engine, precision):
            return source
        method = method_of(engine, precision)
        folder = self._cache / f"{self.digest(model)[:16]}-{engine}-{precision}-{RECIPES[engine]}"
        target = folder / method.file_name(source)
        if not target.is_file():
            original = self.original(model)
            with load_model(original) as loaded:
                samples = collect_samples(original.settings.task, loaded.task, None)
                Converter(original, loaded, samples, 0.0).convert(method, folder, lambda _: None)
        return target


def _needs_conversion(engine: str, precision: str) -> bool:
    """Return True if the precision needs a converted file. PyTorch needs no file, because it converts while loading."""
    return engine in RECIPES and precision in CONVERTED


def find_settings_problem(settings: Mapping[str, Any]) -> str | None:
    """Return the first problem of a model.yaml, or None if it is valid."""
    try:
        ModelSettings.model_validate(settings)
    except ValidationError as error:
        return describe_first_problem(error)
    return None


def write_repository(target: Path, model: str, source: Path, file: Path, settings: Mapping[str, Any]) -> Path:
    """Create a repository with one model: a link to `file` in place of `source`, and to the files beside it."""
    version = target / model / "1"
    version.mkdir(parents=True)
    weights = weight_files(file) if file != source else []
    left_out = {*OWN, *(each.name for each in weight_files(source))} if weights else set(OWN)
    beside = [each for each in source.parent.iterdir() if each.name not in left_out]
    for each in (*beside, *weights):
        (version / each.name).symlink_to(each.resolve())
    (target / model / "model.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    return target
