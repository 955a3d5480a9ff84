"""Hosts of a cluster on one machine: network namespaces on a bridge, which can be cut off."""

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

NEEDED = "hosts need the `ip` command (Debian: iproute2) and the right to make network namespaces (root)"
STOP_S = 40.0
PREFIX = "pn"  # prefix of the names of bridges, namespaces and links, which have at most 15 characters


class Hosts:
    """A context manager for hosts. Also removes processes and namespaces that a killed run left behind."""

    def __init__(self, count: int) -> None:
        self._names: list[str] = []
        self._bridge = ""
        self._count = count
        self._processes: list[HostProcess] = []

    def __enter__(self) -> Self:
        _remove_left()
        token = f"{os.getpid():x}{uuid.uuid4().hex[:2]}"
        self._bridge = f"{PREFIX}{token}"
        number = uuid.uuid4().int
        self._net = f"10.{128 + number % 100}.{(number >> 16) % 256}"
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for index in range(self._count):
                self._add(f"{self._bridge}-{index}", index)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """Return the address at which other hosts and this machine reach the host."""
        return f"{self._net}.{host + 1}"

    def name(self, host: int) -> str:
        """Return the name of the host's network namespace."""
        return self._names[host]

    def inside(self, host: int) -> tuple[str, ...]:
        """Return the start of a command line that runs on the host."""
        return ("ip", "netns", "exec", self._names[host])

    def run(self, host: int, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> "HostProcess":
        """Start a command on a host; its output goes to the log."""
        process = HostProcess([*self.inside(host), *command], log, env)
        self._processes.append(process)
        return process

    def cut_off(self, host: int) -> None:
        """Drop all packets to and from the host; processes on the host still reach each other."""
        _ip("link", "set", _link(self._names[host]), "nomaster")

    def heal(self, host: int) -> None:
        _ip("link", "set", _link(self._names[host]), "master", self._bridge)

    def separate(self, host: int, *others: int) -> None:
        """Drop all packets between the host and `others`. Other connections are not affected."""
        for one, other in [(host, other) for other in others] + [(other, host) for other in others]:
            nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
            _ip("-n", self._names[one], "neigh", "replace", self.address(other), *nobody, "dev", "eth0")

    def unite(self, host: int, *others: int) -> None:
        for one, other in [(host, other) for other in others] + [(other, host) for other in others]:
            _ip("-n", self._names[one], "neigh", "del", self.address(other), "dev", "eth0")

    def _add(self, name: str, index: int) -> None:
        _ip("netns", "add", name)
        self._names.append(name)
        _ip("link", "add", _link(name), "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", _link(name), "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", name, "link", "set", link, "up")

    def _remove(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.end()
        for name in self._names:
            _ip("netns", "del", name)
        if self._bridge:
            _ip("link", "del", self._bridge)


class HostProcess:
    """A process on a host. `ip netns exec` becomes the command itself, so signals reach the command."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Wait for the end of the process, or kill it; return the exit code."""
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def stop(self) -> int:
        self.terminate()
        return self.end()

    def lines(self, event: str = "") -> list[dict[str, Any]]:
        """Return the log lines, or those of one event."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        found = [json.loads(line) for line in text if line.startswith("{") and line.endswith("}")]
        return [line for line in found if event in ("", line.get("event"))]


class ServiceProcess:
    """A service process that tests can freeze, kill and restart."""

    def __init__(self) -> None:
        self._process: HostProcess | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def process(self) -> HostProcess:
        assert self._process is not None, "start it first"
        return self._process

    def run(self, command: Sequence[str], log: Path) -> None:
        self._process = HostProcess(command, log)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP: connections stay open, and nothing is answered."""
        self.process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.signal(signal.SIGCONT)


def _link(name: str) -> str:
    """Return the name of the bridge's end of a host's link."""
    return name.replace("-", "v")


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(NEEDED) from error
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}; {NEEDED}")
    return done.stdout


def _remove_left() -> None:
    """Remove bridges and namespaces whose creator, by the process id in their names, has ended."""
    for link in json.loads(_ip("-j", "link", "show", "type", "bridge") or "[]"):
        name = link["ifname"]
        if name.startswith(PREFIX) and not _is_alive(name):
            for namespace in [each["name"] for each in json.loads(_ip("-j", "netns") or "[]")]:
                if namespace.startswith(f"{name}-"):
                    for pid in _ip("netns", "pids", namespace).split():
                        os.kill(int(pid), 9)
                    _ip("netns", "del", namespace)
            _ip("link", "del", name)


def _is_alive(name: str) -> bool:
    try:
        return Path(f"/proc/{int(name[len(PREFIX) : -2], 16)}").exists()
    except ValueError:
        return True  # the process belongs to another user
