"""What a check of a model finds: problems that keep it from being served, and warnings."""

import os
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    code: str  # stable: scripts may go by it
    message: str
    advice: str = ""  # what to do
    is_warning: bool = False
    version: str = ""  # empty: of the model as a whole


def as_json(findings: Iterable[Finding]) -> dict[str, list[dict[str, str]]]:
    told: dict[str, list[dict[str, str]]] = {"problems": [], "warnings": []}
    for found in findings:
        said = {key: value for key, value in asdict(found).items() if value and key != "is_warning"}
        told["warnings" if found.is_warning else "problems"].append(said)
    return told


def warning(code: str, message: str, advice: str = "", version: str = "") -> Finding:
    return Finding(code, message, advice, is_warning=True, version=version)


def command(*words: object) -> str:
    """A line that can be pasted into a shell, whatever the paths in it are."""
    return shlex.join(str(word) for word in words)


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(not finding.is_warning for finding in findings)


def dangling_link(file: Path) -> Finding:
    message = f"{file} is a link to {os.readlink(file)}, which is not there"
    return Finding("dangling_link", message, "Make the link anew, or copy the file in its place.")


def unreadable(path: Path, error: OSError) -> Finding:
    advice = "The user that runs Penstock must be able to read it: chmod -R a+rX, or chown."
    return Finding("unreadable", f"{path} cannot be read: {(error.strerror or str(error)).lower()}", advice)
