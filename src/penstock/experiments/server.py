"""The server of one configuration: started with a repository of its own, ready when every worker is, and stopped."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from penstock.experiments.experiment import Case
from penstock.experiments.processes import ServerFailed, ServerRun
from penstock.experiments.variants import Variants

PORTS = ("grpc_port", "http_port")


class ExperimentServer(ServerRun):
    def __init__(self, models: Path, folder: Path, workers: int, *flags: str) -> None:
        self._workers = workers
        super().__init__(models, folder, *flags)

    def _is_ready(self, http: str) -> bool:
        """With all of its workers: the server itself is ready with the first."""
        try:
            with urllib.request.urlopen(f"http://{http}/v1/status", timeout=5) as answer:
                status = json.load(answer)
        except OSError:
            return False
        for block in status["blocks"]:
            if block["state"] == "failed":
                raise ServerFailed(f"the model cannot be loaded: {block['reason']}")
        holding = sum(bool(worker["blocks"]) for worker in status["workers"])
        return bool(status["ready"]) and holding >= self._workers


@contextmanager
def serving(case: Case, variants: Variants, folder: Path) -> Iterator[ServerRun]:
    """`folder` is emptied, and gets the repository, the server's settings and its log."""
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
