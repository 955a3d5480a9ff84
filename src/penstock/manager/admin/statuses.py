"""How workers and blocks stand, as operators see them."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import reduce

from penstock.core.blocks import BlockRecord, BlockRole
from penstock.core.statistics import add_standings
from penstock.manager.deployed_block import DeployedBlock, WorkerState
from penstock.manager.desired import BLOCKS, WORKERS
from penstock.manager.events import Event
from penstock.manager.manager import Manager
from penstock.manager.reign import Load
from penstock.manager.telling.etags import tagged
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import manager_pb2
from penstock.wire.forms import encode_devices, encode_standing

MESSAGES = ("counts", "devices")  # of a load
UNKNOWN = "unknown"  # how a worker is, to a manager that does not lead


class Statuses:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def workers(self) -> Iterator[pb.WorkerStatus]:
        names = {*self._manager.reign.lives.items(), *self._manager.desired.workers}
        return map(self.worker, sorted(names))

    def blocks(self, model: str = "") -> Iterator[pb.BlockStatus]:
        """Those that operators see: what only stands in where others fail is not among them."""
        found = [
            block
            for block in self._manager.reign.registry.blocks()
            if model in ("", block.model) and (block.is_shown or block.record.role is not BlockRole.SPARE)
        ]
        found.sort(key=lambda block: (block.model, int(block.version)))
        return map(self.block, found)

    def state(self, block: DeployedBlock) -> str:
        return str(block.state()[0]) if self._manager.epoch else UNKNOWN

    def worker(self, worker_id: str) -> pb.WorkerStatus:
        reign = self._manager.reign
        life, record = reign.lives.get(worker_id), reign.record(worker_id)
        facts, load = reign.facts.get(worker_id), reign.loads.get(worker_id)
        status = pb.WorkerStatus(
            worker_id=worker_id,
            state=str(life.state) if life is not None else UNKNOWN if not self._manager.epoch else "offline",
            incarnation=life.incarnation if life is not None else "",
            silent_s=reign.lives.silent_s(worker_id) if life is not None else 0.0,
            is_draining=record.is_draining,
            is_removed=bool(record.removed) and (life is None or record.removed == life.incarnation),
            blocks=[
                _reported(block.block_id, block.workers[worker_id])
                for block in reign.registry.blocks()
                if worker_id in block.workers
            ],
        )
        if facts is not None:
            told = asdict(facts)
            status.pid = told.pop("pid")
            status.facts.CopyFrom(manager_pb2.WorkerFacts(**told | {"labels": {**facts.labels, **record.labels}}))
        if load is not None:
            status.load.CopyFrom(_load(load))
        return tagged(status, self._manager.desired.revisions.get(WORKERS + worker_id, 0))

    def block(self, block: DeployedBlock) -> pb.BlockStatus:
        reign = self._manager.reign
        counts = [load.counts[block.block_id] for load in reign.loads.values() if block.block_id in load.counts]
        standings = [each.generation for each in counts if each.generation is not None]
        status = pb.BlockStatus(
            block_id=block.block_id,
            spec=_spec(block.record),
            role=block.record.role,
            state=self.state(block),
            reason=block.state()[1] if self._manager.epoch else "",
            revision=block.revision,
            holders=[
                pb.BlockHolder(worker_id=worker, state=found.state, reason=found.reason, is_serving=found.is_serving)
                for worker, found in sorted(block.workers.items())
            ],
            placed=reign.placed(block) if block.is_wanted else [],
            requests=sum(each.requests for each in counts),
            errors=sum(each.errors for each in counts),
            latency_s=sum(each.latency_s for each in counts),
            generation=encode_standing(reduce(add_standings, standings) if standings else None),
        )
        return tagged(status, self._manager.desired.revisions.get(BLOCKS + block.block_id, 0))


def event_status(number: int, event: Event) -> pb.ClusterEvent:
    return pb.ClusterEvent(number=number, **dict(event))


def _spec(record: BlockRecord) -> pb.BlockSpec:
    return pb.BlockSpec(
        model=record.model,
        version=record.version,
        source=record.source,
        replicas=record.replicas,
        **record.resources.model_dump(),
        labels=record.labels,
        anti_affinity=record.anti_affinity,
        metadata=json.dumps(record.metadata) if record.metadata else "",
        weight=record.weight,
    )


def _reported(block_id: str, found: WorkerState) -> manager_pb2.BlockState:
    return manager_pb2.BlockState(block_id=block_id, **found._asdict())


def _load(load: Load) -> manager_pb2.WorkerLoad:
    counts = [manager_pb2.BlockCounts(block_id=name, **asdict(each)) for name, each in sorted(load.counts.items())]
    told = {name: value for name, value in asdict(load).items() if name not in MESSAGES and value is not None}
    return manager_pb2.WorkerLoad(**told, counts=counts, devices=encode_devices(load.devices))
