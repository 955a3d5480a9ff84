"""Scans a model's folder for the registry: the files, digests and facts of a version."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.features.registry.facts import complete_facts
from penstock.features.registry.manifest import Manifest, ModelFacts, find_path_fault, make_manifest, read_document
from penstock.models.check.check import check_model
from penstock.models.check.findings import outside_link
from penstock.models.folder import ModelFolder, is_outside, model_files, read_model_folder, read_version

TENSOR = re.compile(r"(?P<name>.*) (?P<datatype>\S+) (?P<shape>\[[^\]]*\])")


@dataclass(frozen=True, slots=True)
class ScannedModel:
    """A version in a folder, ready for upload."""

    manifest: Manifest
    files: Mapping[str, Path]  # by SHA-256


def find_version(folder: Path, version: str) -> ModelFolder:
    """Return the requested version, or the newest served one; raise ConfigError if there is none."""
    path = folder.absolute()
    return read_version(path, version) if version else read_model_folder(path)


def scan(folder: Path, version: str, on_file: Callable[[str], None] = lambda _: None) -> ScannedModel:
    """Read all files once; return the manifest and the files."""
    model = find_version(folder, version)
    version = version or model.versions[-1]
    _check_link(model.path / version, model.path)
    files: dict[str, Path] = {}
    entries = []
    for file in model_files(model, version):
        path = file.relative_to(model.path).as_posix()
        if fault := find_path_fault(path):
            raise InvalidRequest(f"{fault}: rename the file", reason="files")
        _check_link(file, model.path)
        if not file.is_file():
            raise InvalidRequest(f"{file} is not a file", reason="files")
        on_file(path)
        sha256, size_bytes = _hash_file(file)
        entries.append({"path": path, "size_bytes": size_bytes, "sha256": sha256})
        files[sha256] = file
    entries.sort(key=lambda entry: str(entry["path"]))
    manifest = make_manifest(model.name, version, entries)
    complete_facts(manifest, model.settings_of(version), ModelFacts())  # raises what the registry would raise
    return ScannedModel(manifest, files)


def check_facts(folder: Path, version: str, timeout_s: float) -> ModelFacts:
    """Return the facts that `penstock model check` finds by loading the model; raise ConfigError for a problem."""
    found = check_model(folder.absolute(), timeout_s)
    if found["problems"]:
        first = found["problems"][0]
        problem = " ".join(filter(None, (first["message"], first.get("advice", ""))))
        raise ConfigError(
            f"{problem}\n(`penstock model check {folder}` shows all problems; --no-check sends the model anyway)"
        )
    if found.get("version") != version:
        return ModelFacts()
    facts = {
        "inputs": _parse_tensors(found["inputs"]),
        "outputs": _parse_tensors(found["outputs"]),
        "batchable": found["max_batch_size"] > 0,
        "quantized": True if found["precision"] in ("int8", "int4") else None,
    }
    return read_document(ModelFacts, facts, "metadata")


def _parse_tensors(described: list[str]) -> list[dict[str, Any]] | None:
    found = [TENSOR.fullmatch(each) for each in described]
    if not all(found):
        return None
    return [{**each.groupdict(), "shape": json.loads(each["shape"])} for each in found if each]


def _check_link(path: Path, folder: Path) -> None:
    """Raise InvalidRequest for a link out of the folder, which could expose any file of the user."""
    if is_outside(path, folder):
        found = outside_link(path)
        raise InvalidRequest(f"{found.message}. {found.advice}", reason="link")


def _hash_file(file: Path) -> tuple[str, int]:
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
            return found, opened.tell()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
