"""One look at the whole cluster, for its metrics: what workers and gateways have told the manager that leads."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from prometheus_client.registry import Collector

from penstock.core.cluster.model_answers import ModelAnswers
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.manager import Manager
from penstock.manager.reign import BlockCount, Facts, Load
from penstock.telemetry.cluster import (
    BlockFigures,
    BlockOnWorker,
    ClusterCollector,
    ClusterFigures,
    WorkerFigures,
)

Key = tuple[str, str]  # model and version


class Overview:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._answers: dict[str, tuple[str, dict[Key, ModelAnswers]]] = {}  # by gateway: its incarnation, and since
        self._past: dict[Key, ModelAnswers] = {}  # of incarnations that are gone
        manager.on_answers.append(self._answered)
        manager.figures = self.as_json

    def collector(self) -> Collector:
        """Of this moment; it may be read in another thread."""
        return ClusterCollector(self.look())

    def as_json(self) -> str:
        figures = asdict(self.look())
        for block in figures["blocks"]:
            block["answers"] = block["answers"] and block["answers"]._asdict()
        return json.dumps(figures)

    def look(self) -> ClusterFigures:
        manager = self._manager
        blocks = manager.reign.registry.shown()
        answers = self._totals()
        return ClusterFigures(
            is_leader=bool(manager.epoch),
            epoch=manager.election.leader_epoch,
            revision=manager.desired.revision,
            gateways=len(manager.desired.gateways.gateways),
            managers=len(manager.election.managers),
            blocks=[self._block(block, answers.get((block.model, block.version))) for block in blocks],
            workers=[self._worker(worker_id) for worker_id in manager.reign.lives.items()],
        )

    def _answered(self, gateway_id: str, incarnation: str, answers: Sequence[ModelAnswers]) -> None:
        before, known = self._answers.get(gateway_id, (incarnation, {}))
        if before != incarnation:
            _add(self._past, known.values())
            known = {}
        self._answers[gateway_id] = (incarnation, known | {(each.model, each.version): each for each in answers})

    def _totals(self) -> dict[Key, ModelAnswers]:
        found = dict(self._past)
        for _, answers in self._answers.values():
            _add(found, answers.values())
        return found

    def _block(self, block: DeployedBlock, answers: ModelAnswers | None) -> BlockFigures:
        placed = len(self._manager.reign.placed(block)) if block.is_wanted else 0
        return BlockFigures(
            block.block_id,
            block.model,
            block.version,
            str(block.state()[0]),
            (block.record.replicas or placed) if block.is_wanted else 0,
            placed,
            sum(found.is_serving for found in block.workers.values()),
            answers,
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
            [_on_worker(block_id, count) for block_id, count in load.counts.items()],
        )


def _on_worker(block_id: str, count: BlockCount) -> BlockOnWorker:
    return BlockOnWorker(block_id, count.requests, count.errors, count.latency_s, count.generation)


def _add(totals: dict[Key, ModelAnswers], more: Iterable[ModelAnswers]) -> None:
    for each in more:
        key = (each.model, each.version)
        totals[key] = totals[key].plus(each) if key in totals else each
