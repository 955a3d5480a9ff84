"""The findings of a check: problems, which prevent a model from being served, and warnings."""

import os
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    code: str  # does not change between releases, for scripts
    message: str
    advice: str = ""  # what to do
    is_warning: bool = False
    version: str = ""  # empty: the finding is about the whole model


def as_json(findings: Iterable[Finding]) -> dict[str, list[dict[str, str]]]:
    lists: dict[str, list[dict[str, str]]] = {"problems": [], "warnings": []}
    for found in findings:
        fields = {key: value for key, value in asdict(found).items() if value and key != "is_warning"}
        lists["warnings" if found.is_warning else "problems"].append(fields)
    return lists


def warning(code: str, message: str, advice: str = "", version: str = "") -> Finding:
    return Finding(code, message, advice, is_warning=True, version=version)


def command(*words: object) -> str:
    """Return a command with its arguments quoted for a shell."""
    return shlex.join(str(word) for word in words)


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(not finding.is_warning for finding in findings)


def dangling_link(file: Path) -> Finding:
    message = f"{file} is a link to {os.readlink(file)}, which does not exist"
    return Finding("dangling_link", message, "Create the link again, or replace the link with a copy of the file.")


def outside_link(path: Path) -> Finding:
    message = f"{path} is a link to a place outside the model's folder"
    real = f"{command('rm', path)} && {command('cp', '-rL', os.readlink(path), path)}" if path.is_symlink() else ""
    return Finding("outside_link", message, f"Replace the link with a copy of its target{f': {real}' if real else '.'}")


def unreadable(path: Path, error: OSError) -> Finding:
    advice = "Let the user that runs Penstock read the file or folder: chmod -R a+rX, or chown."
    return Finding("unreadable", f"{path} cannot be read: {(error.strerror or str(error)).lower()}", advice)
