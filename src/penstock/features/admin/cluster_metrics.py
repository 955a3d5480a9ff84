"""The metrics of a cluster, from the reports of workers and gateways to the leading manager."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from prometheus_client.registry import Collector

from penstock.core.cluster.model_answers import ModelAnswers
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.feature import ManagerFeature, TrafficReport
from penstock.manager.term import BlockCount, WorkerFacts, WorkerLoad
from penstock.telemetry.cluster_collector import (
    BlockFigures,
    BlockOnWorker,
    ClusterCollector,
    ClusterFigures,
    WorkerFigures,
)

Key = tuple[str, str]  # model and version


class ClusterOverview(ManagerFeature):
    """Collects the current figures of a cluster, and the counts of answers that the gateways report."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._answers: dict[str, tuple[str, dict[Key, ModelAnswers]]] = {}  # by gateway: its incarnation and counts
        self._past: dict[Key, ModelAnswers] = {}  # counts of gateways that have ended or restarted
        self.sessions: dict[str, Mapping[str, int]] = {}  # by gateway: the counts of its last report

    def make_collector(self) -> Collector:
        """Return the current metrics; the result may be read in another thread."""
        return ClusterCollector(self.collect_figures())

    def format_as_json(self) -> str:
        figures = asdict(self.collect_figures())
        for block in figures["blocks"]:
            block["answers"] = block["answers"] and block["answers"]._asdict()
        return json.dumps(figures)

    def collect_figures(self) -> ClusterFigures:
        control = self._control
        blocks = control.term.blocks.list_shown_blocks()
        answers = self._sum_answers()
        return ClusterFigures(
            is_leader=bool(control.epoch),
            epoch=control.election.leader_epoch,
            revision=control.desired.revision,
            gateways=len(control.desired.gateways.gateways),
            managers=len(control.election.managers),
            blocks=[self._collect_block_figures(block, answers.get((block.model, block.version))) for block in blocks],
            workers=[self._collect_worker_figures(worker_id) for worker_id in control.term.liveness.get_records()],
        )

    def traffic_reported(self, report: TrafficReport) -> None:
        if report.sessions is not None:
            self.sessions[report.gateway_id] = report.sessions
        if not report.answers:
            return
        incarnation, known = self._answers.get(report.gateway_id, (report.incarnation, {}))
        if incarnation != report.incarnation:
            _add_answers(self._past, known.values())
            known = {}
        known = known | {(each.model, each.version): each for each in report.answers}
        self._answers[report.gateway_id] = (report.incarnation, known)

    def _sum_answers(self) -> dict[Key, ModelAnswers]:
        found = dict(self._past)
        for _, answers in self._answers.values():
            _add_answers(found, answers.values())
        return found

    def _collect_block_figures(self, block: DeployedBlock, answers: ModelAnswers | None) -> BlockFigures:
        placed = len(self._control.term.find_target_workers(block)) if block.is_wanted else 0
        return BlockFigures(
            block.block_id,
            block.model,
            block.version,
            str(block.compute_state()[0]),
            (block.record.replicas or placed) if block.is_wanted else 0,
            placed,
            sum(found.is_serving for found in block.workers.values()),
            answers,
        )

    def _collect_worker_figures(self, worker_id: str) -> WorkerFigures:
        term = self._control.term
        lives, facts, load = (
            term.liveness,
            term.facts.get(worker_id, WorkerFacts()),
            term.loads.get(worker_id, WorkerLoad()),
        )
        return WorkerFigures(
            worker_id,
            str(lives.get_records()[worker_id].state),
            lives.compute_silent_s(worker_id),
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
            [_to_block_on_worker(block_id, count) for block_id, count in load.counts.items()],
        )


def _to_block_on_worker(block_id: str, count: BlockCount) -> BlockOnWorker:
    return BlockOnWorker(block_id, count.requests, count.errors, count.latency_s, count.generation)


def _add_answers(totals: dict[Key, ModelAnswers], more: Iterable[ModelAnswers]) -> None:
    for each in more:
        key = (each.model, each.version)
        totals[key] = totals[key].add_counts(each) if key in totals else each
