"""Runs the program `trial` for a model in a separate process, which may crash or hang, and returns the findings."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from penstock.models.check.findings import Finding

GRACE_S = 5.0  # time for the process itself to report that the model hangs
LAST_LINES = 12
_OWN_LINES = ("<frozen", "Extension modules", "Fatal Python error", "models/check/trial.py")
_DOING = {"": "started", "load": "loaded the model", "request": "answered a request"}


def try_version(folder: Path, version: str, timeout_s: float) -> tuple[dict[str, Any], list[Finding]]:
    """Try to load and run a version in a separate process; return the model's properties and the findings."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as words, os.fdopen(reading, "rb", buffering=0) as pipe:
        try:
            process = _start_process(folder, version, timeout_s, writing, words)
        finally:
            os.close(writing)
        try:
            steps, is_late = _read_steps(pipe, time.monotonic() + timeout_s + GRACE_S)
            if is_late:
                process.send_signal(signal.SIGABRT)  # Python then writes its traceback
            code = _wait(process)
        finally:
            _kill(process)
        last = steps[-1] if steps else {}
        if "facts" in last:
            return last["facts"], _make_findings(last, version)
        stages = [str(step["stage"]) for step in steps]
        is_late |= "late" in stages
        doing = _DOING[next((stage for stage in reversed(stages) if stage != "late"), "")]
        return {}, [_explain_end(doing, version, code, is_late, timeout_s, _read_last_lines(words))]


def _start_process(
    folder: Path, version: str, timeout_s: float, fd: int, stderr_file: IO[bytes]
) -> "subprocess.Popen[bytes]":
    # -P: a model must not import modules from the current folder.
    command = [sys.executable, "-P", "-m", "penstock.models.check.trial", str(folder), version, str(timeout_s), str(fd)]
    # In a session of its own, so that its children can be ended with it.
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stderr_file, stderr=stderr_file, pass_fds=[fd], start_new_session=True
    )


def _read_steps(pipe: IO[bytes], deadline: float) -> tuple[list[dict[str, Any]], bool]:
    """Return the reports of the trial process, and whether the deadline passed before its last report."""
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while is_there := selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(pipe.fileno(), 65536)
            if not part:
                break
            output += part
            if b'{"facts"' in output and output.endswith(b"\n"):
                break  # the report is complete, even if a child of the process keeps the pipe open
    lines = output.split(b"\n")[:-1]  # the last line is empty or incomplete
    return [json.loads(line) for line in lines], not is_there


def _wait(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _make_findings(last_report: dict[str, Any], version: str) -> list[Finding]:
    return [
        Finding(each["code"], each["message"], each.get("advice", ""), is_warning, version)
        for key, is_warning in (("problems", False), ("warnings", True))
        for each in last_report[key]
    ]


def _explain_end(doing: str, version: str, code: int, is_late: bool, timeout_s: float, last_lines: str) -> Finding:
    if is_late:
        message = f"version {version} hung while it {doing}: there was no response within {timeout_s:g} s{last_lines}"
        return Finding(
            "timed_out", message, "Find out why the model waits, or allow more time: --timeout SECONDS", version=version
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    message = f"version {version} crashed the process that {doing} ({how}){last_lines}"
    advice = (
        "The model would crash its worker each time. Try another engine (onnx, openvino), or export the model again."
    )
    return Finding("crashed", message, advice, version=version)


def _read_last_lines(stderr_file: IO[bytes]) -> str:
    stderr_file.seek(0)
    lines = stderr_file.read().decode(errors="replace").splitlines()
    shown = [line for line in lines if line.strip() and not any(own in line for own in _OWN_LINES)]
    return "".join(f"\n{line}" for line in shown[-LAST_LINES:])
