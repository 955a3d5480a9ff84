"""The model of a case, ready to be served: its file in the asked precision and its model.yaml."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.bench.experiment import Case
from penstock.bench.repository import NOOP
from penstock.core.errors import ConfigError
from penstock.core.models import ModelFolder, ModelSettings, read_model_folder
from penstock.engines.availability import why_not
from penstock.engines.onnx_variants import RECIPE, convert

CONVERTED = ("int8", "fp16")
FITTING_DATA = {"embed": "pairs", "upscale": "photos"}


class Variants:
    """Over a model repository. Converted files are kept in `cache`, by what they were made of."""

    def __init__(self, models: Path, cache: Path) -> None:
        self._models = models
        self._cache = cache
        self._digests: dict[str, str] = {}

    def folder(self, model: str) -> ModelFolder:
        path = self._models / model
        if model == NOOP and not path.exists():
            path = _write_noop(self._cache / NOOP)
        if not (path / "model.yaml").is_file():
            raise ConfigError(f"{path}: no such model; say where your repository is with --models")
        return read_model_folder(path)

    def engine_of(self, model: str) -> str:
        return self.folder(model).settings.engine

    def data_of(self, model: str) -> str:
        return FITTING_DATA.get(self.folder(model).settings.task, "noop")

    def file(self, model: str) -> Path:
        folder = self.folder(model)
        return folder.file(folder.versions[-1])

    def digest(self, model: str) -> str:
        """Of the model's file."""
        if model not in self._digests:
            with self.file(model).open("rb") as stream:
                self._digests[model] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._digests[model]

    def why_not(self, case: Case) -> str | None:
        """Why this machine cannot run the case; None where it can."""
        reason = why_not(case.engine, case.device, case.precision)
        if reason:
            return reason
        try:
            ModelSettings.model_validate(self.settings(case))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            message = str(first["msg"]).removeprefix("Value error, ")
            return f"{where}: {message}" if where else message
        return None

    def settings(self, case: Case) -> dict[str, Any]:
        """The case's model.yaml: the model's own with what the case says laid over it."""
        found = yaml.safe_load((self.folder(case.model).path / "model.yaml").read_text()) or {}
        # A converted file has its precision in it; the engine is asked for nothing else.
        precision = "fp32" if case.precision in CONVERTED else case.precision
        found.update(engine=case.engine, precision=precision, versions="latest")
        found["batching"] = {**(found.get("batching") or {}), **case.batching}
        instances = {"count": case.instances, "threads": case.threads}
        given = {key: value for key, value in instances.items() if value is not None}
        found["instances"] = {**(found.get("instances") or {}), **given, "device": case.device}
        return found

    def build_repository(self, case: Case, target: Path) -> Path:
        """A repository with this model alone; files are linked, not copied."""
        version = target / case.model / "1"
        version.mkdir(parents=True)
        source = self.file(case.model)
        for beside in source.parent.iterdir():
            if beside != source:
                (version / beside.name).symlink_to(beside.resolve())
        (version / source.name).symlink_to(self._in_precision(case.model, case.precision).resolve())
        _write_settings(target / case.model / "model.yaml", self.settings(case))
        return target

    def _in_precision(self, model: str, precision: str) -> Path:
        source = self.file(model)
        if precision not in CONVERTED:
            return source
        found = self._cache / f"{self.digest(model)[:16]}-{precision}-{RECIPE}.onnx"
        if not found.is_file():
            convert(source, found, precision)
        return found


def _write_settings(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(yaml.safe_dump(dict(settings), sort_keys=False))


def _write_noop(folder: Path) -> Path:
    """The no-op that benchmarks use, as a model's folder."""
    source = Path(__file__).parent / "data" / "identity"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "model.onnx", folder / "1" / "model.onnx")
    shutil.copy(source / "model.yaml", folder / "model.yaml")
    return folder
