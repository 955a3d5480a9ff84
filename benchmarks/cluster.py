"""Clusters on several hosts of one machine: each role is a process in a network namespace."""

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks.hosts import HostProcess, Hosts
from benchmarks.waiting import eventually

MANAGER_PORT = 7400
START_S = 120.0
DEBUG = {"PENSTOCK_TELEMETRY__LOG_LEVEL": "debug"}  # terms and attachments are logged at this level


class ClusterHosts(Hosts):
    """Starts roles on hosts. The log and the data of a role are in a folder with the role's name."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self.folder = folder
        self.roles: dict[str, HostProcess] = {}

    def role(self, host: int, role: str, *flags: str, name: str = "", node: str = "") -> HostProcess:
        """Start a role's process on a host. The default node name is `h<host>`."""
        name = name or f"{node or f'h{host}'}.{role}"
        folder = self.folder / name
        command = [sys.executable, "-m", "penstock", role, "--node", node or f"h{host}", "--data-dir", str(folder)]
        process = self.roles[name] = self.run(host, [*command, *flags], folder / "log", DEBUG)
        return process

    def manager(self, host: int, models: Path, *flags: str) -> HostProcess:
        bind = ("--bind", self.address(host), "--insecure")
        process = self.role(host, "manager", "--models", str(models), *bind, *flags)
        eventually(lambda: _find_event(process, "manager_started"), f"the manager manages: {process.log}", START_S)
        return process

    def gateway(self, host: int, join: str, *flags: str) -> HostProcess:
        return self.role(host, "gateway", "--join", join, "--host", self.address(host), "--insecure", *flags)

    def worker(self, host: int, join: str, *flags: str, node: str = "") -> HostProcess:
        return self.role(host, "worker", "--join", join, *flags, node=node)

    def http(self, host: int, path: str, port: int = 8080, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Send a GET request to a host; return status and body, or status 0 without an answer."""
        try:
            with urlopen(f"http://{self.address(host)}:{port}{path}", timeout=timeout_s) as answer:
                return int(answer.status), answer.read()
        except HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def post(self, host: int, path: str, port: int = 8080, timeout_s: float = 10.0) -> str:
        """Send a POST request without a body; return the body of an error, or an empty text after success."""
        request = Request(f"http://{self.address(host)}:{port}{path}", method="POST")
        try:
            urlopen(request, timeout=timeout_s).close()
        except HTTPError as error:
            return error.read().decode()
        return ""

    def status(self, host: int) -> dict[str, Any]:
        """Return the status of a gateway."""
        found: dict[str, Any] = json.loads(self.http(host, "/v1/status")[1] or b"{}")
        return found

    def workers(self, host: int) -> set[str]:
        """Return the workers that a gateway knows."""
        return {worker["id"] for worker in self.status(host).get("workers", [])}

    def wait_ready(self, host: int, within_s: float = START_S) -> None:
        eventually(lambda: self.http(host, "/v2/health/ready")[0] == 200, f"the gateway on host {host}", within_s)


def start_manager(models: Path, folder: Path, **environment: str) -> HostProcess:
    """Start a manager on free loopback ports, and return it when it has become the leader."""
    command = [sys.executable, "-m", "penstock", "manager", "--models", str(models), "--bind", "127.0.0.1:0"]
    command += ["--data-dir", str(folder / "data"), "--health-port", "0", "--health-grpc-port", "0"]
    process = HostProcess(command, folder / "manager.log", environment)
    eventually(lambda: _find_event(process, "manager_started"), f"the manager manages: {process.log}", START_S)
    return process


def _find_event(process: HostProcess, event: str) -> bool:
    if not process.is_running():
        raise RuntimeError(f"it ended: {process.log.read_text(errors='replace')[-2000:]}")
    return bool(process.lines(event))
