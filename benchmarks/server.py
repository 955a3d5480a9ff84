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
from penstock.app.folders import MANAGER_SOCKET
from penstock.experiments.processes import ServerRun

TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*(.{0,200})")
STOP_S = 60.0
BACK_S = 90.0  # a worker that was killed


class ServerProcess(ServerRun):
    """Runs from the moment it is made; use it as a context, which ends it. `settings` are as in its configuration
    file."""

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
        """Ends it gently and returns its exit code; what does not end is killed, and that is an error."""
        self.process.terminate()
        try:
            return int(self.process.wait(STOP_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise TimeoutError(f"the server did not end within {STOP_S:g} s: {self._last_words()}") from None

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def status(self) -> dict[str, Any]:
        return self.get("/v1/status")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; histograms by `name_count` or `name_sum`."""
        return float(
            sum(
                sample["value"]
                for metric in self.get("/metrics.json").values()
                for sample in metric["samples"]
                if sample["name"] in (name, f"{name}_total") and labels.items() <= sample["labels"].items()
            )
        )

    async def load_model(self, model: str, within_s: float = 30.0) -> tuple[int, str]:
        """Anew from its folder; the answer's status and text, 0 where there is none."""
        try:
            async with httpx.AsyncClient(base_url=self.http_url, timeout=within_s) as client:
                answer = await client.post(f"/v2/repository/models/{model}/load")
        except httpx.HTTPError as error:
            return 0, repr(error)
        return answer.status_code, answer.text

    def tracebacks(self) -> Counter[str]:
        """Exceptions that nobody expected, in any of the processes, by what they say."""
        text = self.log.read_text(errors="replace").replace("\\n", "\n")
        return Counter(TRACEBACK.findall(text))

    def family(self) -> list[psutil.Process]:
        """The processes that it has started, and those that they have."""
        return psutil.Process(self.pid).children(recursive=True)

    def children(self, role: str) -> dict[str, int]:
        """Its processes of a role (`gateway`, `worker`, `tasks`), by name."""
        found: dict[str, int] = {}
        for process in self.family():
            try:
                command = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # it ended between two looks
            if role in command and "--run-dir" in command:
                found[command[command.index("--id") + 1]] = process.pid
        return found

    def process_ids(self) -> set[int]:
        return {self.pid, *(process.pid for process in self.family())}

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in (psutil.Process(self.pid), *self.family()))

    def ready_workers(self) -> dict[str, int]:
        """The workers that hold every block that the server wants, by id, with their process ids."""
        status = self.status()
        wanted = {block["block_id"] for block in status["blocks"] if block["state"] not in ("unloaded", "failed")}
        return {worker["id"]: worker["pid"] for worker in status["workers"] if wanted <= set(worker["blocks"])}

    async def wait_workers(self, is_reached: Callable[[dict[str, int]], bool]) -> float:
        """Returns how long it took until the ready workers were as wanted."""
        started = time.monotonic()
        await until_seen(lambda: is_reached(self.ready_workers()), "the workers are as wanted", BACK_S)
        return time.monotonic() - started

    async def replace_worker(self, number: int, by: signal.Signals) -> float:
        """Sends a worker the signal that ends it; workers take turns by `number`. Returns how long it took until
        another process was ready in its place."""
        workers = await self.wait_all_workers()
        victim, pid = sorted(workers.items())[number % len(workers)]
        os.kill(pid, by)
        return await self.wait_workers(lambda ready: ready.get(victim, pid) != pid)

    async def wait_all_workers(self) -> dict[str, int]:
        await self.wait_workers(lambda ready: len(ready) == self.workers)
        return await asyncio.to_thread(self.ready_workers)

    def run_folder(self) -> Path:
        """Where its sockets are, from a worker's command line."""
        for child in self.family():
            command = child.cmdline()
            if "--run-dir" in command:
                return Path(command[command.index("--run-dir") + 1])
        raise RuntimeError("the server has no worker process")

    def manager(self) -> str:
        """Where its manager listens."""
        return f"unix:{self.run_folder()}/{MANAGER_SOCKET}"

    def router_endpoint(self) -> str:
        """Where the first gateway's router socket listens."""
        return f"ipc://{self.run_folder()}/gateway-0.ipc"

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.http_url}{path}", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def _last_words(self) -> str:
        return "\n".join(["", *self.log.read_text(errors="replace").splitlines()[-30:]])
