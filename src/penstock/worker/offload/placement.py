"""Where a block's requests are prepared and finished, by its `placement`: here, in task processes, in task workers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.models.loading import LoadedBlock
from penstock.worker.offload.pool import TaskPool, TaskProcesses
from penstock.worker.offload.process import TaskProcess


class TaskPlacement:
    def __init__(self, processes: int, task_workers: Sequence[Path]) -> None:
        """`processes` of the worker's own; `task_workers` are sockets."""
        self._processes = TaskProcesses([TaskProcess.start] * processes)
        self._has_workers = bool(task_workers)
        self._workers = TaskProcesses([partial(TaskProcess.connect, path) for path in task_workers])

    async def open(self, loaded: LoadedBlock) -> TaskPool | None:
        """None: the worker prepares and finishes the block's requests itself."""
        placement = loaded.settings.placement
        if placement == "worker" and not self._has_workers:
            raise ConfigError("placement: worker needs worker.task_workers above 0 in the server's configuration")
        if placement == "inline" or loaded.task.is_prepare_cheap:
            return None
        processes = self._workers if placement == "worker" else self._processes
        return await processes.open(loaded.spec)

    async def close(self) -> None:
        await self._processes.close()
        await self._workers.close()
