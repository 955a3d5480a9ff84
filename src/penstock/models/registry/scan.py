"""A model's folder as the registry takes it: which files a version is made of, their digests, what is known of it."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.manifest import Manifest, ModelFacts, make_manifest, path_fault, read_document
from penstock.models.check.check import check_model
from penstock.models.folder import ModelFolder, model_files, read_model_folder, read_version
from penstock.models.registry.facts import complete_facts

TENSOR = re.compile(r"(?P<name>.*) (?P<datatype>\S+) (?P<shape>\[[^\]]*\])")


@dataclass(frozen=True, slots=True)
class ScannedModel:
    manifest: Manifest
    files: Mapping[str, Path]  # by SHA-256


def find_version(folder: Path, version: str) -> ModelFolder:
    """The version that was asked for, or the newest that would be served; raises ConfigError."""
    path = folder.absolute()
    return read_version(path, version) if version else read_model_folder(path)


def scan(folder: Path, version: str, on_file: Callable[[str], None] = lambda _: None) -> ScannedModel:
    """Reads all of it once."""
    model = find_version(folder, version)
    version = version or model.versions[-1]
    files: dict[str, Path] = {}
    entries = []
    for file in model_files(model, version):
        path = file.relative_to(model.path).as_posix()
        if fault := path_fault(path):
            raise InvalidRequest(f"{fault}: rename the file", reason="files")
        _check_link(file, model.path)
        on_file(path)
        sha256, size_bytes = _digest(file)
        entries.append({"path": path, "size_bytes": size_bytes, "sha256": sha256})
        files[sha256] = file
    entries.sort(key=lambda entry: str(entry["path"]))
    manifest = make_manifest(model.name, version, entries)
    complete_facts(manifest, model.settings_of(version), ModelFacts())  # what the registry would refuse
    return ScannedModel(manifest, files)


def check_facts(folder: Path, version: str, timeout_s: float) -> ModelFacts:
    """What `penstock model check` finds out by loading the model; raises ConfigError with what is wrong."""
    found = check_model(folder.absolute(), timeout_s)
    if found["problems"]:
        first = found["problems"][0]
        told = " ".join(filter(None, (first["message"], first.get("advice", ""))))
        raise ConfigError(f"{told}\n(penstock model check {folder} tells all; --no-check sends it all the same)")
    if found.get("version") != version:
        return ModelFacts()
    facts = {
        "inputs": _tensors(found["inputs"]),
        "outputs": _tensors(found["outputs"]),
        "batchable": found["max_batch_size"] > 0,
        "quantized": True if found["precision"] in ("int8", "int4") else None,
    }
    return read_document(ModelFacts, facts, "metadata")


def _tensors(told: list[str]) -> list[dict[str, Any]] | None:
    found = [TENSOR.fullmatch(each) for each in told]
    if not all(found):
        return None
    return [{**each.groupdict(), "shape": json.loads(each["shape"])} for each in found if each]


def _check_link(file: Path, folder: Path) -> None:
    """A link that leads out of the folder may lead to anything of the user's."""
    real = Path(os.path.realpath(file))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise InvalidRequest(
            f"{file} is a link that leads out of the model's folder: put the file itself there (cp -rL copies so)",
            reason="link",
        )
    if not real.is_file():
        raise InvalidRequest(f"{file} is no file", reason="files")


def _digest(file: Path) -> tuple[str, int]:
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
            return found, opened.tell()
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be read: {error.strerror}") from error
