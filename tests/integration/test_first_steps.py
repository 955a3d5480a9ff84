"""What a new user meets: the set-up script, completion in the shell, and the server's words on a terminal."""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import ROOT, write_identity

START_S = 60.0
READY = "Press Ctrl-C to stop."


def test_a_set_up_that_reaches_no_packages_says_what_to_do(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt", "client/pyproject.toml", "scripts/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        ["scripts/setup"], cwd=tmp_path, env={**kept, **nowhere}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip could not install" in done.stderr
    assert "Packages come from http://127.0.0.1:9/simple" in done.stderr
    assert "set PIP_INDEX_URL to a mirror" in done.stderr


def test_bash_completes_commands(tmp_path: Path) -> None:
    complete = (
        "penstock --install-completion bash && . ~/.bashrc && COMP_WORDS=(penstock model rel) COMP_CWORD=2 && "
        '_penstock_completion penstock && echo "found ${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", complete], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["found reload"], done.stderr


@pytest.mark.parametrize("colors", [{}, {"NO_COLOR": "1"}], ids=["colours", "no colours"])
def test_a_server_on_a_terminal_says_what_it_serves_and_what_to_try(tmp_path: Path, colors: dict[str, str]) -> None:
    write_identity(tmp_path / "models", "plain", "FP32")
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "model.yaml").write_text("tasks: embed\n")
    words = [sys.executable, "-m", "penstock", "serve", "models", "--http-port", "0", "--grpc-port", "0"]
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(words, cwd=tmp_path, env={**environment, "TERM": "xterm", **colors}, stderr=theirs)
    os.close(theirs)
    shown = ""
    deadline = time.monotonic() + START_S
    try:
        while READY not in shown and time.monotonic() < deadline:
            shown += os.read(ours, 65536).decode()
    finally:
        process.terminate()
        process.wait(START_S)
        os.close(ours)
    assert ("\x1b[" in shown) is not bool(colors)
    assert "unknown key 'tasks'" in shown
    banner = shown[shown.index("Penstock is ready.") :]
    (address,) = re.findall(r"Dashboard: +(http://127\.0\.0\.1:\d+)/\r", banner)
    assert f"API reference: {address}/docs" in banner
    assert banner.count("penstock ") >= 3
