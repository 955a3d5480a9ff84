"""A new version of a model in its repository: it appears whole, under a number of its own, or not at all."""

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
from penstock.core.yaml_file import laid_over
from penstock.models.folder import VERSION_FILE, ModelFolder

REPORT = "quantization.json"
PREFIX, LOCK = ".quantize-", ".lock"  # a folder with a dot before its name is no version
OWN = (VERSION_FILE, REPORT)


@contextmanager
def staging(model: Path) -> Iterator[Path]:
    """A hidden folder beside the versions. What a killed run left of its own is taken away first."""
    try:
        _sweep(model)
        folder = Path(mkdtemp(prefix=PREFIX, dir=model))
    except OSError as error:
        raise ConfigError(f"{model}: cannot be written: {error.strerror}", file=str(model)) from error
    lock = os.open(folder / f"{LOCK}ing", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f"{LOCK}ing", folder / LOCK)  # whoever finds it finds it held
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def fill(folder: Path, model: ModelFolder, version: str, weights: set[str], settings: Mapping[str, Any]) -> None:
    """Beside the converted file: what else the version needs, and a version.yaml that says what differs."""
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
        written = yaml.safe_dump(laid_over(before or {}, dict(settings)), sort_keys=False)
        (folder / VERSION_FILE).write_text(written, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder.parent}: cannot be written: {error}", file=str(folder.parent)) from error


def publish(folder: Path, model: Path, report: Mapping[str, Any]) -> str:
    """Gives the staged folder the next number; returns it. Another run that took it meanwhile has the one before."""
    try:
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        folder.chmod(0o755)  # mkdtemp's are their maker's alone, and servers run as somebody else
        (folder / LOCK).unlink()
        while True:
            target = model / str(_last(model) + 1)
            try:
                os.rename(folder, target)  # onto a folder that has files it fails
                return target.name
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    except OSError as error:
        raise ConfigError(f"{model}: cannot be written: {error.strerror}", file=str(model)) from error


def read_report(model: Path, version: str) -> dict[str, Any] | None:
    """The report of a version that was made by quantizing another one; None for any other."""
    try:
        return dict(json.loads((model / version / REPORT).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def original_of(model: Path, version: str) -> str:
    """The version that this one was made of, where it was made of one that is still there; else itself."""
    source = str((read_report(model, version) or {}).get("of_version", ""))
    return source if source.isdecimal() and (model / source).is_dir() else version


def _last(model: Path) -> int:
    return max((int(child.name) for child in model.iterdir() if child.name.isdecimal()), default=0)


def _sweep(model: Path) -> None:
    """A run holds a lock on its folder for as long as it lives."""
    for folder in model.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:
            continue  # being made, or being published
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
