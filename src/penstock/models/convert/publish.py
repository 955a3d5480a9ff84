"""Publishes a new version of a model in the model's repository, atomically and under a new number."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.core.yaml_file import merge_settings
from penstock.models.folder import VERSION_FILE, ModelFolder

REPORT = "quantization.json"
PREFIX, LOCK = ".quantize-", ".lock"  # folders whose name starts with a dot are not versions
OWN = (VERSION_FILE, REPORT)


@contextmanager
def create_staging_folder(model: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside the version folders, after removing the hidden folders of killed runs."""
    try:
        _remove_stale_folders(model)
        folder = Path(mkdtemp(prefix=PREFIX, dir=model))
    except OSError as error:
        raise ConfigError(f"{model}: cannot be written: {error.strerror}", file=str(model)) from error
    lock = os.open(folder / f"{LOCK}ing", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f"{LOCK}ing", folder / LOCK)  # the lock file appears when it is locked
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def copy_other_files(
    folder: Path, model: ModelFolder, version: str, weights: set[str], settings: Mapping[str, Any]
) -> None:
    """Copy a version's files, except its weights, into `folder`, and write a version.yaml with changed settings."""
    source = model.path / version
    try:
        for beside in source.iterdir():
            if beside.name in weights or beside.name in OWN or beside.name.startswith((".", "__")):
                continue
            if beside.is_dir():
                shutil.copytree(beside, folder / beside.name)
            else:
                shutil.copy2(beside, folder / beside.name)
        own = source / VERSION_FILE
        before = yaml.safe_load(own.read_text(encoding="utf-8")) if own.is_file() else None
        written = yaml.safe_dump(merge_settings(before or {}, dict(settings)), sort_keys=False)
        (folder / VERSION_FILE).write_text(written, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder.parent}: cannot be written: {error}", file=str(folder.parent)) from error


def publish(folder: Path, model: Path, report: Mapping[str, Any]) -> str:
    """Move the staged folder to the next free version number; return the number."""
    try:
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        folder.chmod(0o755)  # mkdtemp's folders are private, and servers may run as another user
        (folder / LOCK).unlink()
        while True:
            target = model / str(_newest_version(model) + 1)
            try:
                os.rename(folder, target)  # fails if the target has files
                return target.name
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    except OSError as error:
        raise ConfigError(f"{model}: cannot be written: {error.strerror}", file=str(model)) from error


def read_report(model: Path, version: str) -> dict[str, Any] | None:
    """Return the quantization report of a version, or None if the version was not quantized."""
    try:
        return dict(json.loads((model / version / REPORT).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def original_of(model: Path, version: str) -> str:
    """Return the version from which `version` was quantized, if the original still exists; otherwise `version`."""
    source = str((read_report(model, version) or {}).get("of_version", ""))
    return source if source.isdecimal() and (model / source).is_dir() else version


def _newest_version(model: Path) -> int:
    return max((int(child.name) for child in model.iterdir() if child.name.isdecimal()), default=0)


def _remove_stale_folders(model: Path) -> None:
    """Remove the hidden folders of killed runs; those of live runs are locked."""
    for folder in model.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:
            continue  # in use by a live run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
