"""Hosts as network namespaces: they reach each other until one is cut off, and leave nothing behind."""

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


def test_a_host_that_was_cut_off_is_reachable_again_once_reconnected(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        server = hosts.run(0, [sys.executable, "-c", LISTEN], tmp_path / "log")

        def is_reachable() -> bool:
            connect = [sys.executable, "-c", CONNECT, hosts.address(0)]
            return hosts.run(1, connect, tmp_path / "log").end() == 0

        eventually(is_reachable, "the first host listens")
        hosts.cut_off(0)
        assert not is_reachable()
        hosts.heal(0)
        eventually(is_reachable, "it is back")
        name = hosts.name(0)
        assert name in namespaces()
    assert not server.is_running()
    assert name not in namespaces()


def test_namespaces_of_a_killed_run_are_removed_by_the_next_run(tmp_path: Path) -> None:
    crashed = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, text=True, check=False)
    left = crashed.stdout.strip()
    assert left in namespaces()
    with Hosts(0):
        assert left not in namespaces()


def test_without_namespaces_the_error_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="iproute2"):
        Hosts(1).__enter__()
