"""Follows docs/models.md and docs/engines.md word for word: runs every command and compares every output.

The part between `<!-- follow -->` and `<!-- end -->` is followed in order, in one shell, in an empty folder: `sh`
blocks are run, blocks of other languages that begin with `# a/path` are saved to that path, and a `text` block is the
output of the commands before it. Only the server's two port numbers are replaced by free ones. Figures with a unit
and the number of instances depend on the machine, and are not compared.
"""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.peers.peer import find_free_ports
from tests.servers import ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLLOWED = re.compile(r"<!-- follow -->(.*?)<!-- end -->", re.DOTALL)
MACHINES = re.compile(r"\b\d+(?:\.\d+)? (kB|MB|ms|s)\b|\b\d+ (instance)s?\b")
MARK = "--- block done:"
LIMIT_S = 150


@dataclass
class Block:
    language: str
    text: str
    expected: str | None = None  # its output


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    for part in FOLLOWED.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        for language, text in FENCE.findall(part):
            if language == "text":
                assert found[-1].language == "sh", f"{page}: an output follows no command: {text}"
                found[-1].expected = text
            else:
                found.append(Block(language, text))
    assert len(found) > 3, f"{page} has nothing to follow"
    return found


def script(page: list[Block]) -> str:
    """Return one shell script that prints a mark and the exit code after each of the page's commands."""
    lines = []
    for block in page:
        if block.language == "sh":
            lines.append(f'{block.text}printf "\\n%s %s\\n" {shlex.quote(MARK)} $?\n')
            continue
        name = re.match(r"# (\S+)\n", block.text)
        assert name, f"a {block.language} block must begin with '# path'"
        lines.append(f"mkdir -p $(dirname {name[1]}) && cat > {name[1]} <<'PAGE'\n{block.text}PAGE\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make an environment for what a page installs; packages of this environment are visible in it."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # addsitedir, unlike a plain path, also reads the .pth files there, which editable installs need.
    (packages / "seen.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for command in ("penstock", "pip"):
        program = folder / "bin" / command
        program.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m {command} "$@"\n')
        program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "VIRTUAL_ENV"))}
    own = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if importlib.util.find_spec("setuptools"):
        # So that pip downloads none to build a package. The switch is inverted: 0 means without isolation.
        own["PIP_NO_BUILD_ISOLATION"] = "0"
    return kept | own


@pytest.mark.parametrize("page", ["models.md", "engines.md"])
def test_documented_commands_give_the_documented_output(page: str, tmp_path: Path, environment: dict[str, str]) -> None:
    followed = blocks(page)
    ports = dict(zip(("8080", "50051"), map(str, find_free_ports(2)), strict=True))
    text = re.sub(r"\b(8080|50051)\b", lambda found: ports[found[0]], script(followed))
    printed = run(text, tmp_path, environment)
    commands = [block for block in followed if block.language == "sh"]
    assert len(printed) == len(commands), f"stopped after {len(printed)} of {len(commands)} commands:\n{printed[-1:]}"
    for block, (output, code) in zip(commands, printed, strict=True):
        assert code == 0, f"{block.text}\n{output}\n{log(tmp_path)}"
        if block.expected is not None:
            assert comparable(output) == comparable(block.expected), f"of:\n{block.text}"


def run(text: str, folder: Path, environment: dict[str, str]) -> list[tuple[str, int]]:
    """Return the output and exit code of each command."""
    with (folder / "printed").open("w+") as output:
        shell = subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):  # the result is read below
                shell.wait(LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)  # a server that a page started ends with the shell
            shell.wait(30)
        output.seek(0)
        parts = re.split(rf"^{MARK} (\d+)\n", output.read(), flags=re.MULTILINE)
    return [(said, int(code)) for said, code in zip(parts[0::2], parts[1::2], strict=False)]


def comparable(output: str) -> str:
    return MACHINES.sub(lambda found: f"# {found[1] or found[2]}", output).strip()


def log(folder: Path) -> str:
    file = folder / "server.log"
    return file.read_text(errors="replace")[-3000:] if file.exists() else ""
