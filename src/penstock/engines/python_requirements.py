"""Whether what a Python model's requirements.txt asks for is installed. Nothing is ever installed here."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.core.errors import ConfigError

FILE = "requirements.txt"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_requirements(model_file: Path) -> None:
    """Looks beside the model file and beside model.yaml; raises ConfigError with what is missing and what to do."""
    for folder in (model_file.parent, model_file.parent.parent):
        file = folder / FILE
        if not file.is_file():
            continue
        found = [problem for line in _lines(file) if (problem := _problem(line, file))]
        if found:
            raise ConfigError(
                f"{file}: the model needs packages that are not installed: {'; '.join(found)}. "
                f"Install them with: {sys.executable} -m pip install -r {file}",
                file=str(file),
            )


def _lines(file: Path) -> Iterator[str]:
    """Without comments, pip's own options and hashes."""
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        kept = re.split(r"(?:^|\s)(?:#|--)", line.strip(), maxsplit=1)[0].strip()
        if kept and not kept.startswith("-"):
            yield kept


def _problem(line: str, file: Path) -> str:
    """Empty: it is there."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:  # its version cannot be compared then
        named = _NAME.match(line)
        return "" if named and _installed(named[0]) else line
    try:
        wanted = Requirement(line)
    except InvalidRequirement as error:
        raise ConfigError(f"{file}: '{line}' is no requirement", file=str(file)) from error
    if wanted.marker is not None and not wanted.marker.evaluate():
        return ""
    there = _installed(wanted.name)
    if not there:
        return line
    if not wanted.specifier.contains(there, prereleases=True):
        return f"{line} ({there} is installed)"
    return ""


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
