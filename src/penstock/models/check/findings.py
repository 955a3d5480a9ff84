"""What a check of a model finds: problems that keep it from being served, and warnings."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    code: str  # stable: scripts may go by it
    message: str
    advice: str = ""  # what to do
    is_warning: bool = False
    version: str = ""  # empty: of the model as a whole

    def as_json(self) -> dict[str, str]:
        found = {"code": self.code, "message": self.message, "advice": self.advice, "version": self.version}
        return {key: value for key, value in found.items() if value}


def warning(code: str, message: str, advice: str = "", version: str = "") -> Finding:
    return Finding(code, message, advice, is_warning=True, version=version)


def command(*words: object) -> str:
    """To be pasted into a shell, whatever the paths in it are."""
    return shlex.join(str(word) for word in words)


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(not finding.is_warning for finding in findings)
