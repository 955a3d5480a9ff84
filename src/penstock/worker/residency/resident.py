"""A block in memory: its runner, its size, whether it is in use, and how it is unloaded."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from penstock.models.loading import LoadedBlock
from penstock.worker.offload.task_pool import TaskPool
from penstock.worker.running.batch_runner import BatchRunner
from penstock.worker.running.block_runner import BlockRunner, WorkerTools
from penstock.worker.running.call_runner import CallRunner
from penstock.worker.running.generation_runner import GenerationRunner

log = structlog.get_logger()


class OpenedFiles(Protocol):
    """A handle on a model's files, which stay on disk until the handle is closed."""

    @property
    def folder(self) -> Path: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class ResidentBlock:
    """A loaded block, and the memory and files that it uses."""

    runner: BlockRunner
    size_bytes: int
    files: OpenedFiles  # kept on disk until the block is unloaded
    device_bytes: int = 0  # of its GPU's memory
    answered: int = 0  # number of jobs answered before the last call of `has_run`

    def has_run(self) -> bool:
        """Return whether the block has answered jobs since the last call of this method."""
        statistics = self.runner.statistics
        before, self.answered = self.answered, statistics.success.count + statistics.fail.count
        return self.answered != before

    async def end(self, drain_s: float) -> None:
        """Finish running jobs, close the engine, and wait until the engine has released the model."""
        runner = self.runner
        try:
            await asyncio.wait_for(runner.drain(), drain_s)
        except TimeoutError:
            log.warning("drain_timed_out", model=runner.description.model, jobs=len(runner))
        await runner.close().wait()


def make_runner(loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None = None) -> BlockRunner:
    match loaded.request_mode:
        case "generations":
            return GenerationRunner(loaded, tools, tasks)
        case "calls":
            return CallRunner(loaded, tools, tasks)
        case "batches":
            return BatchRunner(loaded, tools, tasks)
