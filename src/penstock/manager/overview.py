"""One look at the whole cluster, for its metrics: what workers and gateways have told the manager that leads."""

from collections.abc import Sequence

from prometheus_client.registry import Collector

from penstock.core.answer_counts import AnswerCounts
from penstock.manager.manager import Manager
from penstock.manager.registry import DeployedBlock
from penstock.manager.reign import BlockCount, Facts, Load
from penstock.telemetry.cluster import (
    AnswerTotals,
    BlockFigures,
    BlockOnWorker,
    ClusterCollector,
    ClusterFigures,
    WorkerFigures,
)


class Overview:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._epoch = 0
        self._totals = AnswerTotals()
        manager.on_counts.append(self._count)

    def collector(self) -> Collector:
        """Of this moment; it may be read in another thread."""
        return ClusterCollector(self.look())

    def look(self) -> ClusterFigures:
        manager = self._manager
        blocks = [block for block in manager.reign.registry.blocks() if block.is_shown]
        self._totals.keep(block.block_id for block in blocks)
        return ClusterFigures(
            is_leader=bool(manager.epoch),
            epoch=manager.election.leader_epoch,
            revision=manager.desired.revision,
            gateways=len(manager.desired.gateways.gateways),
            managers=len(manager.election.managers),
            blocks=[self._block(block) for block in blocks],
            workers=[self._worker(worker_id) for worker_id in manager.reign.lives.items()],
        )

    def _count(self, gateway_id: str, counts: Sequence[AnswerCounts]) -> None:
        if self._epoch != self._manager.reign.epoch:
            self._epoch, self._totals = self._manager.reign.epoch, AnswerTotals()
        self._totals.add([each for each in counts if not each.is_control])

    def _block(self, block: DeployedBlock) -> BlockFigures:
        placed = len(self._manager.reign.placed(block)) if block.is_wanted else 0
        return BlockFigures(
            block.block_id,
            block.model,
            block.version,
            str(block.state()[0]),
            (block.record.replicas or placed) if block.is_wanted else 0,
            placed,
            sum(found.is_serving for found in block.workers.values()),
            dict(self._totals.codes.get(block.block_id, {})),
            dict(self._totals.latencies.get(block.block_id, {})),
        )

    def _worker(self, worker_id: str) -> WorkerFigures:
        reign = self._manager.reign
        lives, facts, load = reign.lives, reign.facts.get(worker_id, Facts()), reign.loads.get(worker_id, Load())
        return WorkerFigures(
            worker_id,
            str(lives.items()[worker_id].state),
            lives.silent_s(worker_id),
            load.cpu,
            facts.cpus,
            load.memory_bytes,
            facts.memory_bytes,
            load.gpu,
            load.gpu_memory_bytes,
            facts.gpu_memory_bytes,
            load.jobs,
            load.waiting,
            load.busy,
            load.instances,
            [BlockOnWorker(block_id, *_of(count)) for block_id, count in load.counts.items()],
        )


def _of(count: BlockCount) -> tuple[int, int, float]:
    return count.requests, count.errors, count.latency_s
