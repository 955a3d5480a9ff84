"""The server of one configuration: started with a repository of its own, ready when every worker is, and stopped."""

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from penstock.experiments.experiment import Case
from penstock.experiments.processes import START_TIMEOUT_S, ServerRun
from penstock.experiments.variants import Variants

PORTS = ("grpc_port", "http_port")
PERIOD_S = 0.1


class ServerFailed(Exception):
    """The server did not start, or cannot load the model; its message says why."""


class ExperimentServer(ServerRun):
    def __init__(self, models: Path, folder: Path, workers: int, *flags: str) -> None:
        self._workers = workers
        super().__init__(models, folder, *flags)

    def _wait_ready(self) -> tuple[str, str]:
        """Its own block has not begun: what interrupts the wait must end the process here."""
        try:
            return self._wait_for_workers()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _wait_for_workers(self) -> tuple[str, str]:
        """All of them: the server itself is ready with the first."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server did not start: {self._last_words()}")
            addresses = self._addresses()
            if addresses and self._is_complete(_status(addresses[0])):
                return addresses
            time.sleep(PERIOD_S)
        raise ServerFailed(f"the server was not ready within {START_TIMEOUT_S:g} s: {self._last_words()}")

    def _is_complete(self, status: dict[str, Any]) -> bool:
        for block in status.get("blocks", ()):
            if block["state"] == "failed":
                raise ServerFailed(f"the model cannot be loaded: {block['reason']}")
        holding = sum(bool(worker["blocks"]) for worker in status.get("workers", ()))
        return bool(status.get("ready")) and holding >= self._workers

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("penstock: ") if lines else "it said nothing"


@contextmanager
def serving(case: Case, variants: Variants, folder: Path) -> Iterator[ServerRun]:
    """In `folder`, anew: the repository, the server's settings and its log."""
    shutil.rmtree(folder, ignore_errors=True)
    models = variants.build_repository(case, folder / "models")
    config = folder / "server.yaml"
    config.write_text(yaml.safe_dump({key: value for key, value in case.server.items() if key not in PORTS}))
    flags = ["--config", str(config)]
    for key in PORTS:
        if case.server[key]:
            flags += [f"--{key.replace('_', '-')}", str(case.server[key])]
    with ExperimentServer(models, folder, case.server["workers"], *flags) as server:
        yield server


def _status(http: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{http}/v1/status", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (urllib.error.URLError, OSError):
        return {}
