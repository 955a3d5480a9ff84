"""The process that tries a model: started, watched, and heard out when it crashes or hangs."""

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

GRACE_S = 5.0  # after its time it says itself what hangs, if it can
LAST_LINES = 12
_OWN_LINES = ("<frozen", "Extension modules", "Fatal Python error", "models/check/trial.py")
_DOING = {"": "started", "load": "loaded the model", "request": "answered a request"}


def try_version(folder: Path, version: str, timeout_s: float) -> tuple[dict[str, Any], list[Finding]]:
    """Returns facts of the loaded version, and what is wrong with it."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as words, os.fdopen(reading, "rb", buffering=0) as pipe:
        try:
            process = _start(folder, version, timeout_s, writing, words)
        finally:
            os.close(writing)
        try:
            told, is_late = _listen(pipe, time.monotonic() + timeout_s + GRACE_S)
            if is_late:
                process.send_signal(signal.SIGABRT)  # Python then writes where it was
            code = _wait(process)
        finally:
            _end(process)
        last = told[-1] if told else {}
        if "facts" in last:
            return last["facts"], _findings(last, version)
        stages = [str(step["stage"]) for step in told]
        is_late |= "late" in stages
        doing = _DOING[next((stage for stage in reversed(stages) if stage != "late"), "")]
        return {}, [_explain(doing, version, code, is_late, timeout_s, _last_words(words))]


def _start(folder: Path, version: str, timeout_s: float, fd: int, words: IO[bytes]) -> "subprocess.Popen[bytes]":
    # -P: the folder that the command is given in is not the models' to import from.
    command = [sys.executable, "-P", "-m", "penstock.models.check.trial", str(folder), version, str(timeout_s), str(fd)]
    # A session of its own, so that all it starts can be ended with it.
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, pass_fds=[fd], start_new_session=True
    )


def _listen(pipe: IO[bytes], deadline: float) -> tuple[list[dict[str, Any]], bool]:
    """Returns what the process told, and whether the deadline came before it had closed its end."""
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while is_there := selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(pipe.fileno(), 65536)
            if not part:
                break
            said += part
            if b'{"facts"' in said and said.endswith(b"\n"):
                break  # it is done, even if something that it started lives on
    lines = said.split(b"\n")[:-1]  # the last is empty, or cut off
    return [json.loads(line) for line in lines], not is_there


def _wait(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _findings(told: dict[str, Any], version: str) -> list[Finding]:
    return [
        Finding(each["code"], each["message"], each.get("advice", ""), is_warning, version)
        for key, is_warning in (("problems", False), ("warnings", True))
        for each in told[key]
    ]


def _explain(doing: str, version: str, code: int, is_late: bool, timeout_s: float, words: str) -> Finding:
    if is_late:
        message = f"version {version} hung while it {doing}: nothing came within {timeout_s:g} s{words}"
        return Finding(
            "timed_out", message, "See where it waits, or give it longer: --timeout SECONDS", version=version
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    message = f"version {version} crashed the process that {doing} ({how}){words}"
    advice = "It would end its worker each time. Try another engine (onnx, openvino), or export the model anew."
    return Finding("crashed", message, advice, version=version)


def _last_words(words: IO[bytes]) -> str:
    words.seek(0)
    lines = words.read().decode(errors="replace").splitlines()
    told = [line for line in lines if line.strip() and not any(own in line for own in _OWN_LINES)]
    return "".join(f"\n{line}" for line in told[-LAST_LINES:])
