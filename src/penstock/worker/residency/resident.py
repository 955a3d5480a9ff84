"""A block in memory: its runner, what it takes, whether it is used, and its way out."""

import asyncio
from dataclasses import dataclass

import structlog

from penstock.engines.base import ContextEngine, GeneratingEngine
from penstock.models.loading import LoadedBlock
from penstock.models.registry.cache import OpenedModel
from penstock.worker.offload.pool import TaskPool
from penstock.worker.running.batches import BatchRunner
from penstock.worker.running.calls import CallRunner
from penstock.worker.running.generation import GenerationRunner
from penstock.worker.running.runner import BlockRunner, WorkerTools

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Resident:
    runner: BlockRunner
    size_bytes: int
    files: OpenedModel  # which stay for as long
    device_bytes: int = 0  # of its GPU's memory
    answered: int = 0  # when last looked at

    def has_run(self) -> bool:
        """Whether it has answered jobs since this was last asked."""
        statistics = self.runner.statistics
        before, self.answered = self.answered, statistics.success.count + statistics.fail.count
        return self.answered != before

    async def end(self, drain_s: float) -> None:
        """Lets what runs end and closes the engine; returns when that has let go of the model."""
        runner = self.runner
        try:
            await asyncio.wait_for(runner.drain(), drain_s)
        except TimeoutError:
            log.warning("drain_timeout", model=runner.description.model, jobs=len(runner))
        await runner.close().wait()


def make_runner(loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None = None) -> BlockRunner:
    if isinstance(loaded.engine, GeneratingEngine):
        return GenerationRunner(loaded, loaded.engine, tools, tasks)
    if isinstance(loaded.engine, ContextEngine):
        return CallRunner(loaded, loaded.engine, tools, tasks)
    return BatchRunner(loaded, tools, tasks)
