"""Makes the statuses of workers, blocks and events that operators see."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import reduce

from penstock.core.blocks import BlockRecord, BlockRole
from penstock.core.statistics import add_states
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deployed_block import DeployedBlock, WorkerState
from penstock.manager.desired_state import BLOCKS, WORKERS
from penstock.manager.event_log import Event
from penstock.manager.publishing.etags import with_etag
from penstock.manager.term import WorkerLoad
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import manager_pb2
from penstock.wire.encodings import encode_devices, encode_generation_state

MESSAGES = ("counts", "devices")  # fields of a load that are messages
UNKNOWN = "unknown"  # the state of a worker or block at a manager that does not lead


class Statuses:
    """Makes the status messages of workers and blocks from the manager's state."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    def list_workers(self) -> Iterator[pb.WorkerStatus]:
        names = {*self._control.term.liveness.get_records(), *self._control.desired.workers}
        return map(self.make_worker_status, sorted(names))

    def list_blocks(self, model: str = "") -> Iterator[pb.BlockStatus]:
        """Return the statuses of the blocks that operators see, without unused spare blocks."""
        found = [
            block
            for block in self._control.term.blocks.list_blocks()
            if model in ("", block.model) and (block.is_shown or block.record.role is not BlockRole.SPARE)
        ]
        found.sort(key=lambda block: (block.model, int(block.version)))
        return map(self.make_block_status, found)

    def find_block_state(self, block: DeployedBlock) -> str:
        return str(block.compute_state()[0]) if self._control.epoch else UNKNOWN

    def make_worker_status(self, worker_id: str) -> pb.WorkerStatus:
        term = self._control.term
        life, record = term.liveness.get(worker_id), term.get_worker_record(worker_id)
        facts, load = term.facts.get(worker_id), term.loads.get(worker_id)
        status = pb.WorkerStatus(
            worker_id=worker_id,
            state=str(life.state) if life is not None else UNKNOWN if not self._control.epoch else "offline",
            incarnation=life.incarnation if life is not None else "",
            silent_s=term.liveness.compute_silent_s(worker_id) if life is not None else 0.0,
            is_draining=record.is_draining,
            is_removed=bool(record.removed) and (life is None or record.removed == life.incarnation),
            blocks=[
                _to_block_state(block.block_id, block.workers[worker_id])
                for block in term.blocks.list_blocks()
                if worker_id in block.workers
            ],
        )
        if facts is not None:
            values = asdict(facts)
            status.pid = values.pop("pid")
            status.facts.CopyFrom(manager_pb2.WorkerFacts(**values | {"labels": {**facts.labels, **record.labels}}))
        if load is not None:
            status.load.CopyFrom(_to_worker_load(load))
        return with_etag(status, self._control.desired.revisions.get(WORKERS + worker_id, 0))

    def make_block_status(self, block: DeployedBlock) -> pb.BlockStatus:
        term = self._control.term
        counts = [load.counts[block.block_id] for load in term.loads.values() if block.block_id in load.counts]
        standings = [each.generation for each in counts if each.generation is not None]
        status = pb.BlockStatus(
            block_id=block.block_id,
            spec=_to_spec(block.record),
            role=block.record.role,
            state=self.find_block_state(block),
            reason=block.compute_state()[1] if self._control.epoch else "",
            revision=block.revision,
            holders=[
                pb.BlockHolder(worker_id=worker, state=found.state, reason=found.reason, is_serving=found.is_serving)
                for worker, found in sorted(block.workers.items())
            ],
            placed=term.find_target_workers(block) if block.is_wanted else [],
            requests=sum(each.requests for each in counts),
            errors=sum(each.errors for each in counts),
            latency_s=sum(each.latency_s for each in counts),
            generation=encode_generation_state(reduce(add_states, standings) if standings else None),
        )
        return with_etag(status, self._control.desired.revisions.get(BLOCKS + block.block_id, 0))


def make_event_status(number: int, event: Event) -> pb.ClusterEvent:
    return pb.ClusterEvent(number=number, **dict(event))


def _to_spec(record: BlockRecord) -> pb.BlockSpec:
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


def _to_block_state(block_id: str, worker_state: WorkerState) -> manager_pb2.BlockState:
    return manager_pb2.BlockState(block_id=block_id, **worker_state._asdict())


def _to_worker_load(load: WorkerLoad) -> manager_pb2.WorkerLoad:
    counts = [manager_pb2.BlockCounts(block_id=name, **asdict(each)) for name, each in sorted(load.counts.items())]
    values = {name: value for name, value in asdict(load).items() if name not in MESSAGES and value is not None}
    return manager_pb2.WorkerLoad(**values, counts=counts, devices=encode_devices(load.devices))
