"""The commands of docs/cluster.md run as written, each role on the host that the page names for it.

Every host has a network, a name and a folder of its own: h1 is 10.0.0.1, and so on. Only the network's address and the
keys are replaced.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts
from benchmarks.waiting import eventually
from tests.integration.test_documented_commands import (
    ALL,
    CLUSTER,
    ENDLESS,
    HOSTS,
    LIMIT_S,
    STOPPED,
    WATCHED_S,
    reason_not_to_run,
    run,
)
from tests.servers import ROOT, write_factor

ROLE = re.compile(r"penstock (manager|gateway|worker|serve) .*10\.")
MANAGER, WORKER = 1, 3  # the numbers of hosts


class DocumentedHosts:
    """Runs the page's commands: roles on their hosts, other commands in the folder of the manager's host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._net = hosts.address(0).rpartition(".")[0]
        self.keys: dict[str, str] = {}
        self.ready_url = f"http://{self._net}.2:8080/v2/health/ready"

    def start(self, command: str) -> Path:
        """Start a role and return its log."""
        found = re.search(r"(?:--bind|--host) 10\.0\.0\.(\d)", command)
        number = int(found[1]) if found else WORKER
        own = self._folder / f"h{number}"
        own.mkdir(exist_ok=True)
        text = f"echo h{number} > /proc/sys/kernel/hostname; cd {own}; exec {self._here(command)}"
        environment = {
            "PATH": f"{self._folder}/bin:{os.environ['PATH']}",
            "PENSTOCK_API_KEY": self.keys.get("hosts", ""),
            "PENSTOCK_WORKER__LABELS": '{"tier": "gold"}',  # which a block of the page requires
        }
        self._hosts.run(number - 1, ["unshare", "--uts", "sh", "-c", text], own / "log", environment)
        return own / "log"

    def manage(self, command: str) -> str:
        """Run a command at the manager. Commands that name another server send the key `app`."""
        prefix = f"PENSTOCK_API_KEY={self.keys['app']} " if "--server" in command else ""
        is_endless = ENDLESS.match(command) is not None
        watched = f"timeout {WATCHED_S} " if is_endless else ""
        done = run(f"cd h{MANAGER} && {prefix}{watched}{self._here(command)}", self._folder)
        assert done.returncode == (STOPPED if is_endless else 0), f"{command}\n→ {done.returncode}: {done.stderr}"
        return done.stdout

    def has_worker(self, host: str) -> bool:
        return f"{host}.worker-0" in self.manage("penstock worker list --json")

    def is_ready(self) -> bool:
        return run(f"curl -sf {self.ready_url}", self._folder).returncode == 0

    def _here(self, command: str) -> str:
        return command.replace("10.0.0.", f"{self._net}.")


@pytest.fixture
def documented(tmp_path: Path) -> Iterator[DocumentedHosts]:
    (tmp_path / "h1/models").mkdir(parents=True)
    shutil.copytree(ROOT / "models/minilm", tmp_path / "h1/models/minilm", copy_function=os.link)
    write_factor(tmp_path / "h1/models", "resnet", 2.0, version=3)
    run("true", tmp_path)  # makes the programs
    with Hosts(4) as hosts:
        yield DocumentedHosts(hosts, tmp_path)


@pytest.mark.timeout(600)
def test_the_commands_of_a_cluster_run_as_written(documented: DocumentedHosts) -> None:
    commands = [command for command in ALL[CLUSTER] if reason_not_to_run(command) in ("", HOSTS)]
    creating = [command for command in commands if command.startswith("penstock key create")]
    assert (len(creating), commands[0].split()[:2]) == (2, ["penstock", "manager"])
    for command in commands:
        if ROLE.match(command) and "--server" not in command:
            log = documented.start(command)
        if command == commands[0]:
            eventually(lambda at=log: b"manager_started" in at.read_bytes(), "the manager started", LIMIT_S)  # type: ignore[misc]
            documented.keys = {each.split()[3]: documented.manage(each).strip() for each in creating}
        elif command.startswith("penstock worker --join"):
            eventually(lambda: documented.has_worker("h3"), "the worker joined", LIMIT_S)
            eventually(documented.is_ready, "the gateway is ready", LIMIT_S)
        elif command.startswith("penstock serve"):
            eventually(lambda: documented.has_worker("h4"), "further workers joined", LIMIT_S)
        elif not ROLE.match(command) and not command.startswith(("export ", "penstock key create")):
            documented.manage(command)


def test_the_commands_on_hosts_of_other_pages_are_those_of_the_cluster() -> None:
    for page, found in ALL.items():
        for command in found:
            is_there = command.removeprefix("PENSTOCK_API_KEY=psk_… ") in ALL[CLUSTER]
            assert reason_not_to_run(command) != HOSTS or is_there, f"{page}: {command}"
