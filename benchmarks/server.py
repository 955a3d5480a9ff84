"""The server under test: `penstock serve` as a process, with its status, metrics, log, processes and memory."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.waiting import until_seen
from penstock.experiments.processes import ServerRun
from penstock.storage.server_folders import MANAGER_SOCKET, list_running_servers

TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*(.{0,200})")
STOP_S = 60.0
BACK_S = 90.0  # timeout for a killed worker to be replaced


def find_local_managers(data_dir: Path) -> list[str]:
    """Return the sockets of the managers on this machine that have this data directory."""
    return [each.manager for each in list_running_servers() if each.data_dir == data_dir.absolute() and each.manager]


class ServerProcess(ServerRun):
    """A context manager for a running server. `settings` become its configuration file."""

    def __init__(
        self,
        models: Path,
        folder: Path,
        *flags: str,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        if settings:
            folder.mkdir(parents=True, exist_ok=True)
            config = folder / "config.yaml"
            config.write_text(yaml.safe_dump(dict(settings)))
            flags = (*flags, "--config", str(config))
        self.models = models
        super().__init__(models, folder, *flags, before=before, env={**os.environ, **(environment or {})})

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def http_port(self) -> int:
        return int(self.http.rpartition(":")[2])

    @property
    def grpc_port(self) -> int:
        return int(self.grpc.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def terminate(self) -> int:
        """End the server and return its exit code; raise an error if it had to be killed."""
        self.process.terminate()
        try:
            return int(self.process.wait(STOP_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise TimeoutError(f"the server did not end within {STOP_S:g} s: {self._read_log_end()}") from None

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def status(self) -> dict[str, Any]:
        return self.get("/v1/status")

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; use `name_count` or `name_sum` for histograms."""
        return float(
            sum(
                sample["value"]
                for metric in self.get("/metrics.json").values()
                for sample in metric["samples"]
                if sample["name"] in (name, f"{name}_total") and labels.items() <= sample["labels"].items()
            )
        )

    async def load_model(self, model: str, within_s: float = 30.0) -> tuple[int, str]:
        """Load a model again from its folder; return the status and text of the answer, 0 without an answer."""
        try:
            async with httpx.AsyncClient(base_url=self.http_url, timeout=within_s) as client:
                answer = await client.post(f"/v2/repository/models/{model}/load")
        except httpx.HTTPError as error:
            return 0, repr(error)
        return answer.status_code, answer.text

    def tracebacks(self) -> Counter[str]:
        """Return the unexpected exceptions in the logs of all processes."""
        text = self.log.read_text(errors="replace").replace("\\n", "\n")
        return Counter(TRACEBACK.findall(text))

    def family(self) -> list[psutil.Process]:
        """Return the processes that the server has started, with their descendants."""
        return psutil.Process(self.pid).children(recursive=True)

    def edge_pid(self) -> int:
        """Return the process id of the server's Envoy."""
        found = [each.pid for each in psutil.Process(self.process.pid).children() if each.name() == "envoy"]
        assert len(found) == 1, found
        return found[0]

    def children(self, role: str) -> dict[str, int]:
        """Return the server's processes of a role (`gateway`, `worker`), by name."""
        found: dict[str, int] = {}
        for process in self.family():
            try:
                command = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # the process has ended meanwhile
            if role in command and "--run-dir" in command:
                found[command[command.index("--id") + 1]] = process.pid
        return found

    def process_ids(self) -> set[int]:
        return {self.pid, *(process.pid for process in self.family())}

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in (psutil.Process(self.pid), *self.family()))

    def ready_workers(self) -> dict[str, int]:
        """Return the process ids, by worker id, of the workers that have loaded all their blocks."""
        status = self.status()
        wanted = {block["block_id"] for block in status["blocks"] if block["state"] not in ("unloaded", "failed")}
        return {worker["id"]: worker["pid"] for worker in status["workers"] if wanted <= set(worker["blocks"])}

    async def wait_workers(self, is_reached: Callable[[dict[str, int]], bool]) -> float:
        """Wait until `is_reached` returns True for the ready workers; return the seconds that this took."""
        started = time.monotonic()
        await until_seen(lambda: is_reached(self.ready_workers()), "the workers are as wanted", BACK_S)
        return time.monotonic() - started

    async def replace_worker(self, number: int, by: signal.Signals) -> float:
        """Send the signal to a worker, chosen in turn by `number`.

        Return the time until another process was ready in its place.
        """
        workers = await self.wait_all_workers()
        victim, pid = sorted(workers.items())[number % len(workers)]
        os.kill(pid, by)
        return await self.wait_workers(lambda ready: ready.get(victim, pid) != pid)

    async def wait_all_workers(self) -> dict[str, int]:
        await self.wait_workers(lambda ready: len(ready) == self.workers)
        return await asyncio.to_thread(self.ready_workers)

    def run_folder(self) -> Path:
        """Return the folder of the server's sockets, which a worker's command line contains."""
        for child in self.family():
            command = child.cmdline()
            if "--run-dir" in command:
                return Path(command[command.index("--run-dir") + 1])
        raise RuntimeError("the server has no worker process")

    def manager(self) -> str:
        """Return the address at which the manager listens."""
        return f"unix:{self.run_folder()}/{MANAGER_SOCKET}"

    def router_endpoint(self) -> str:
        """Return the endpoint of the first gateway's socket for workers."""
        return f"ipc://{self.run_folder()}/gateway-0.ipc"

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.http_url}{path}", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def _read_log_end(self) -> str:
        return "\n".join(["", *self.log.read_text(errors="replace").splitlines()[-30:]])
