"""Hosts that are namespaces: they reach each other until one is cut off, and nothing of them is left."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts
from benchmarks.waiting import eventually

LISTEN = "import socket; s = socket.create_server(('', 5000)); [s.accept()[0].close() for _ in iter(int, 1)]"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 0.5).close()"
CRASH = """
import os, sys
from pathlib import Path
from benchmarks.hosts import Hosts
hosts = Hosts(1).__enter__()
hosts.run(0, ["sleep", "600"], Path(sys.argv[1]) / "log")
print(hosts.name(0), flush=True)
os._exit(1)
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_a_host_that_is_cut_off_is_reached_again_when_it_is_healed(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        server = hosts.run(0, [sys.executable, "-c", LISTEN], tmp_path / "log")

        def is_reached() -> bool:
            connect = [sys.executable, "-c", CONNECT, hosts.address(0)]
            return hosts.run(1, connect, tmp_path / "log").end() == 0

        eventually(is_reached, "the first host listens")
        hosts.cut_off(0)
        assert not is_reached()
        hosts.heal(0)
        eventually(is_reached, "it is back")
        name = hosts.name(0)
        assert name in namespaces()
    assert not server.is_running()
    assert name not in namespaces()


def test_what_one_that_was_killed_left_behind_goes_with_the_next(tmp_path: Path) -> None:
    crashed = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, text=True, check=False)
    left = crashed.stdout.strip()
    assert left in namespaces()
    with Hosts(0):
        assert left not in namespaces()


def test_where_there_are_no_namespaces_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="iproute2"):
        Hosts(1).__enter__()
