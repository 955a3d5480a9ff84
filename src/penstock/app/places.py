"""Where the processes of one running server find each other: sockets, the resolved configuration, metrics."""

import sys
from pathlib import Path

from penstock.core.config import Config
from penstock.core.errors import ConfigError


class ServerPlaces:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.json"
        self.metrics = folder / "metrics"
        self.manager = f"unix:{folder / 'manager.sock'}"

    def gateway(self, gateway_id: str) -> str:
        return f"ipc://{self.folder / gateway_id}.ipc"

    def task_worker(self, task_worker_id: str) -> Path:
        return self.folder / f"{task_worker_id}.sock"

    def write_config(self, config: Config) -> None:
        try:
            # Without secrets: the manager, which needs them, has them.
            self.config.write_text(config.model_dump_json(exclude={"s3": {"secret_access_key"}}))
        except OSError as error:
            raise ConfigError(
                f"{self.config}: the configuration cannot be written for the server's processes: {error.strerror}; "
                "free some space, or set TMPDIR to another folder"
            ) from error

    def read_config(self) -> Config:
        try:
            return Config.model_validate_json(self.config.read_text())
        except OSError as error:
            raise ConfigError(f"{self.config}: no server runs there: {error.strerror}") from error

    def command(self, role: str, name: str, *flags: str) -> list[str]:
        """What starts one more process of this server."""
        return [sys.executable, "-m", "penstock", role, "--id", name, "--run-dir", str(self.folder), *flags]


def task_worker_ids(config: Config) -> list[str]:
    return [f"tasks-{index}" for index in range(config.worker.task_workers)]
