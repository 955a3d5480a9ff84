"""The server under faults: `penstock serve` as a process, with its workers, its memory and its log."""

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from penstock.experiments.processes import ServerRun

TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*(.{0,200})")


class FaultyServer(ServerRun):
    """A server that is about to be wronged. `settings` are as in its configuration file."""

    def __init__(self, models: Path, folder: Path, workers: int = 1, settings: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(dict(settings or {})))
        super().__init__(models, folder, "--workers", str(workers), "--config", str(config))
        self._workers = workers

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.http}/v1/status", timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def ready_workers(self) -> dict[str, int]:
        """The workers that hold every block of the server, by id, with their process ids."""
        status = self.status()
        wanted = {block["block_id"] for block in status["blocks"]}
        return {worker["id"]: worker["pid"] for worker in status["workers"] if wanted <= set(worker["blocks"])}

    async def wait_workers(self, is_reached: Callable[[dict[str, int]], bool], timeout_s: float = 90.0) -> float:
        """Returns how long it took until the ready workers were as wanted."""
        started = time.monotonic()
        while True:
            workers = await asyncio.to_thread(self.ready_workers)
            waited_s = time.monotonic() - started
            if is_reached(workers):
                return waited_s
            if waited_s > timeout_s:
                raise TimeoutError(f"the workers stayed {workers} for {timeout_s} s")
            await asyncio.sleep(0.05)

    async def wait_all_workers(self) -> dict[str, int]:
        await self.wait_workers(lambda workers: len(workers) == self._workers)
        return await asyncio.to_thread(self.ready_workers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of the metric that have these labels."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        total = 0.0
        for line in text.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    def process_ids(self) -> set[int]:
        return {process.pid for process in self._tree()}

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._tree())

    def router_endpoint(self) -> str:
        """Where the first gateway's router socket listens, from the run folder on a worker's command line."""
        for child in psutil.Process(self.pid).children():
            command = child.cmdline()
            if "--run-dir" in command:
                return f"ipc://{command[command.index('--run-dir') + 1]}/gateway-0.ipc"
        raise RuntimeError("the server has no worker process")

    def tracebacks(self) -> Counter[str]:
        """Exceptions that nobody expected, in any of the processes, by what they say."""
        text = self.log.read_text(errors="replace").replace("\\n", "\n")
        return Counter(TRACEBACK.findall(text))

    def _tree(self) -> list[psutil.Process]:
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]
