"""A model's folder: its model.yaml, its versions and their files."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError, UnknownModel
from penstock.core.yaml_file import read_yaml
from penstock.models.settings import ModelSettings

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
VERSION_FILE = "version.yaml"  # in a version's folder: what differs there from model.yaml
MODEL_ONLY = ("task", "versions", "tags")  # what no version can have for itself
PACKAGED = ("minilm", "smollm2")  # what comes with Penstock, and whose weights are a package of their own
MAX_LISTED = 8  # names in a message


@dataclass(frozen=True, slots=True)
class ModelFolder:
    name: str
    path: Path
    settings: ModelSettings
    versions: tuple[str, ...]  # those to serve, oldest first
    older: tuple[str, ...] = ()  # where that is the latest alone, those before it, newest first

    def settings_of(self, version: str) -> ModelSettings:
        """The model's settings, with the version's own version.yaml laid over them."""
        return version_settings(self.path, version, self.settings)

    def of_version(self, version: str) -> "ModelFolder":
        """The folder as if it had this version alone."""
        return ModelFolder(self.name, self.path, self.settings_of(version), (version,))

    def file(self, version: str) -> Path:
        return self.path / version / self.settings_of(version).file


def version_settings(folder: Path, version: str, settings: ModelSettings) -> ModelSettings:
    file = folder / version / VERSION_FILE
    if not file.is_file():
        return settings
    return read_yaml(file, ModelSettings, folder / "model.yaml", MODEL_ONLY)


def read_model_folder(path: Path) -> ModelFolder:
    if not NAME.match(path.name):
        raise ConfigError(f"{path}: a model's name is letters, digits, '.', '_' and '-', at most 128", file=str(path))
    settings = read_yaml(path / "model.yaml", ModelSettings)
    try:
        present = _present(path, settings)
        versions = _chosen(path, settings, present)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be read: {error.strerror}", file=str(path)) from error
    older = present[-2::-1] if settings.versions == "latest" else []
    return ModelFolder(path.name, path, settings, tuple(map(str, versions)), tuple(map(str, older)))


def _present(path: Path, settings: ModelSettings) -> list[int]:
    found = sorted(int(child.name) for child in path.iterdir() if child.name.isdecimal() and child.is_dir())
    named = {version: version_settings(path, str(version), settings).file for version in found if version > 0}
    return [version for version, file in named.items() if (path / str(version) / file).is_file()]


def _chosen(path: Path, settings: ModelSettings, present: list[int]) -> list[int]:
    """The versions to serve, oldest first."""
    chosen = choose_versions(settings, present)
    if not isinstance(settings.versions, str) and (missing := sorted(set(settings.versions) - set(present))):
        raise ConfigError(f"{path}: versions {missing} have no {settings.file}", file=str(path))
    if not chosen:
        raise ConfigError(
            f"{path}: no version to serve: expected {path.name}/1/{settings.file}, found {_contents(path)}"
            + (f"; run 'penstock model import {path.name}'" if path.name in PACKAGED else ""),
            file=str(path),
        )
    return chosen


def choose_versions(settings: ModelSettings, present: list[int]) -> list[int]:
    """Those to serve of the ones that are there, oldest first."""
    if settings.versions == "latest":
        return present[-1:]
    return present if settings.versions == "all" else [number for number in present if number in settings.versions]


def _contents(folder: Path) -> str:
    """What lies in a model's folder beside its model.yaml, as much as fits into a message."""
    found = []
    for child in sorted(folder.iterdir()):
        if child.is_dir():
            found += [f"{child.name}/{inner.name}" for inner in sorted(child.iterdir())] or [f"{child.name}/ (empty)"]
        elif child.name != "model.yaml":
            found.append(child.name)
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return (", ".join(found[:MAX_LISTED]) + more) or "nothing beside model.yaml"


def find_model(repository: Path, name: str) -> Path:
    """Raises UnknownModel with those that there are."""
    path = repository / name
    if not (path / "model.yaml").is_file():
        known = ", ".join(each.name for each in list_model_folders(repository)) or "none"
        raise UnknownModel(f"there is no model '{name}' in {repository}; there are {known}")
    return path


def list_model_folders(repository: Path) -> list[Path]:
    if not repository.is_dir():
        raise ConfigError(f"{repository}: no such model repository (a folder of model folders)", file=str(repository))
    return sorted(child for child in repository.iterdir() if _may_be_model(child))


def _may_be_model(child: Path) -> bool:
    """True also of a folder that may not be looked into: whoever reads it then says so."""
    try:
        return (child / "model.yaml").is_file()
    except PermissionError:
        return True


def read_version(folder: Path, version: str) -> ModelFolder:
    """One of them, whatever is wrong with the others; also one that serves until another can take its place."""
    model = ModelFolder(folder.name, folder, read_yaml(folder / "model.yaml", ModelSettings), (version,))
    if not model.file(version).is_file():
        raise ConfigError(f"{folder}: there is no version {version}")
    return model.of_version(version)


def model_files(model: ModelFolder, version: str) -> list[Path]:
    """model.yaml and all that lies in the version's folder: a model may keep its weights in files beside it."""
    found = [model.path / "model.yaml"]
    for folder, folders, names in os.walk(model.path / version):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    for file in found:
        if not file.is_file():  # a pipe or a device would be read without end
            raise ConfigError(f"{file}: this is no file; take it out of the model's folder", file=str(file))
    return found


def size_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def fingerprint_of(root: Path, files: Sequence[Path]) -> str:
    """A digest that is the same for the same files, wherever they lie and however old they are."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        name = os.fsencode(file.relative_to(root))
        total.update(len(name).to_bytes(4, "big") + name + digest)
    return total.hexdigest()
