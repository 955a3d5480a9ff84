"""The venvs of the peers, created from the files in each peer's folder, and again when these files change.

`requirements.txt`, or `requirements.0.txt`, `requirements.1.txt` … installed one after another; `interpreter`, the path
of the Python to make the venv with; `apt.txt`, the Debian packages that it needs. A peer without requirements runs on
the runner's own Python.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.failures import InstallFailed

STAMP = ".stamp"
INSTALL_TIMEOUT_S = 1800.0
REASON_CHARACTERS = 300


def ensure_venv(folder: Path, venvs: Path) -> Path:
    """Return the Python of the peer in this folder; raise InstallFailed."""
    requirements = list_requirement_files(folder)
    if not requirements:
        return Path(sys.executable)
    if (python := find_installed(folder, venvs)) is not None:
        return python
    venv = venvs / folder.name
    python = venv / "bin" / "python"
    print(f"installing {folder.name} (once)", file=sys.stderr, flush=True)
    _install_packages(_read_lines(folder / "apt.txt"))
    shutil.rmtree(venv, ignore_errors=True)
    interpreter = next(iter(_read_lines(folder / "interpreter")), "python3")
    _run([interpreter, "-m", "venv", str(venv)])
    for file in requirements:
        _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(file)])
    (venv / STAMP).write_text(compute_stamp(folder))
    return python


def find_installed(folder: Path, venvs: Path) -> Path | None:
    """Return the Python of the peer in this folder, or None if its venv is missing or was made from other files."""
    venv = venvs / folder.name
    python, made_from = venv / "bin" / "python", venv / STAMP
    is_current = python.exists() and made_from.exists() and made_from.read_text() == compute_stamp(folder)
    return python if is_current else None


def list_requirement_files(folder: Path) -> list[Path]:
    """Return the files in the order of their numbers; `requirements.txt` is first."""
    numbered = {file: re.fullmatch(r"requirements(?:\.(\d+))?\.txt", file.name) for file in folder.glob("*.txt")}
    found = {file: int(match[1] or -1) for file, match in numbered.items() if match}
    return sorted(found, key=lambda file: found[file])


def compute_stamp(folder: Path) -> str:
    """Return a digest of everything that the venv is made from."""
    found = hashlib.sha256()
    for file in [folder / "interpreter", folder / "apt.txt", *list_requirement_files(folder)]:
        if file.exists():
            found.update(f"{file.name}\n{file.read_text()}\n".encode())
    return found.hexdigest()


def _install_packages(packages: Sequence[str]) -> None:
    missing = [name for name in packages if subprocess.run(["dpkg", "-s", name], capture_output=True).returncode]
    if not missing:
        return
    root = [] if os.geteuid() == 0 else ["sudo"]
    _run([*root, "apt-get", "update", "-qq"])
    _run([*root, "apt-get", "install", "-y", "-qq", *missing])


def _read_lines(file: Path) -> list[str]:
    if not file.exists():
        return []
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallFailed(f"not installed: {error}") from error
    if done.returncode:
        raise InstallFailed(f"not installed: {' '.join(command[:4])} …: {done.stderr.strip()[-REASON_CHARACTERS:]}")
