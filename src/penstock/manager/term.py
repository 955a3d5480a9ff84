"""The state of a manager's term (period of leadership): workers, and the blocks of each worker. Pure: no I/O.

A manager that does not lead has a term without workers, and answers read requests from this term.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from penstock.core.blocks import WorkerRecord
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.devices import WorkerDevice
from penstock.core.cluster.routes import NameRoute
from penstock.core.generation import GenerationState
from penstock.manager.block_table import BlockTable
from penstock.manager.deployed_block import DeployedBlock, WorkerState
from penstock.manager.desired_state import DesiredState, PresentWorkers, StateChanges
from penstock.manager.placing.placement import Placement, place_blocks
from penstock.manager.placing.sites import SharedCapacity, WorkerCapacity
from penstock.manager.publishing.publisher import Publisher
from penstock.manager.worker_liveness import (
    LivenessAction,
    LivenessChanged,
    LivenessRecord,
    LivenessRules,
    LivenessState,
    LivenessTick,
    StreamRefused,
    WorkerArrived,
    WorkerLiveness,
    WorkerRemoved,
    WorkerReported,
    WorkerStreamEnded,
)

PRESENT = (LivenessState.ALIVE, LivenessState.SUSPECT)
LARGE = 5000  # a cluster is large if it has more blocks times workers
PLACE_S = 0.5  # seconds between two placements of a large cluster


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The properties that a worker reports when the worker joins."""

    node: str = ""  # name of the machine that the worker runs on
    host: str = ""  # boot id and pid namespace
    zone: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 0.0  # 0: unknown
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    version: str = ""
    shared: tuple[SharedCapacity, ...] = ()
    weight: float = 1.0  # its capacity relative to other workers
    pid: int = 0
    curve_key: str = ""  # public CURVE key of the worker's process
    door: str = ""  # address of the direct endpoint; empty: none; port 0: opened on request
    is_door_tls: bool = False  # the field names here are those of WorkerFacts in the protocol


@dataclass(frozen=True, slots=True)
class BlockCount:
    """A block's figures on one worker since the worker's incarnation started."""

    requests: int = 0
    errors: int = 0
    latency_s: float = 0.0
    generation: GenerationState | None = None  # None if the block does not generate text


@dataclass(slots=True)
class WorkerLoad:
    cpu: float = 0.0  # cores
    memory_bytes: int = 0
    gpu: float | None = None  # share of time in which the GPU was busy
    gpu_memory_bytes: int | None = None
    jobs: int = 0
    waiting: int = 0
    busy: int = 0  # instances
    instances: int = 0
    counts: dict[str, BlockCount] = field(default_factory=dict)  # by block
    devices: Sequence[WorkerDevice] = ()


class BlocksReport(NamedTuple):
    states: Iterable[tuple[str, WorkerState]]
    removed: Iterable[str] = ()
    is_snapshot: bool = True


class EventDraft(NamedTuple):
    """An event to be recorded for operators; the time is added when the event is recorded."""

    kind: str
    subject: str
    text: str


class Term:
    def __init__(
        self, epoch: int, state: DesiredState, rules: LivenessRules, now: float, is_fresh: bool = False
    ) -> None:
        """`is_fresh`: no worker or gateway holds state from an earlier manager."""
        self.epoch = epoch
        self.blocks = BlockTable(is_adopting=not is_fresh)
        self.liveness = WorkerLiveness(rules, now)
        self.publisher = Publisher()
        self.facts: dict[str, WorkerFacts] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self.refused: dict[int, StreamRefused] = {}  # streams to end, by number
        self.event_drafts: list[EventDraft] = []
        self._state = state
        self._expected = None if state.present is None else frozenset(state.present.worker_ids)
        self._placed: dict[str, tuple[str, ...]] = {}
        self._must_place = True
        self._place_at = 0.0
        self._has_changed = False
        for model in {block.record.model for block in state.blocks.values()}:
            self.blocks.apply(model, state.list_model_blocks(model))
        self._update_excluded_workers()
        self.publisher.publish_gateways(state)
        self.publisher.publish_workers_keys(())
        self._place_and_publish()

    # --- events

    def apply_changes(self, state_changes: StateChanges) -> None:
        for model in state_changes.models:
            self.blocks.apply(model, self._state.list_model_blocks(model))
        for model in state_changes.routings:
            self.blocks.mark_stale(model)
        if state_changes.has_gateways:
            self.publisher.publish_gateways(self._state)
        if state_changes.workers:
            self._update_excluded_workers()
        self._must_place = self._must_place or bool(state_changes.models or state_changes.workers)
        self._place_and_publish()

    def worker_joined(self, arrived: WorkerArrived, facts: WorkerFacts, report: BlocksReport, now: float) -> None:
        """Apply the first report of a worker's stream; refuse the stream if another stream of the worker is in use."""
        worker_id = arrived.worker_id
        record = self._state.workers.get(worker_id)
        if record is not None and record.removed == arrived.incarnation:
            reason = "an operator removed this worker; restart it to bring it back"
            self.refused[arrived.stream] = StreamRefused(worker_id, arrived.stream, reason)
            return
        before = self.liveness.get(worker_id)
        earlier = before.incarnation if before is not None else arrived.incarnation
        self._perform(self.liveness.handle(arrived, now))
        if arrived.stream in self.refused:
            return
        if earlier != arrived.incarnation:
            self.blocks.worker_left(worker_id)  # its earlier process has ended
            self.loads.pop(worker_id, None)
        self.facts[worker_id] = facts
        self.publisher.publish_workers_keys(each.curve_key for each in self.facts.values())
        self._update_excluded_workers()
        self.blocks.worker_reported(worker_id, report.states, report.removed, is_snapshot=True)
        self._must_place = True
        self._place_and_publish(now)

    def worker_reported(
        self, reported: WorkerReported, report: BlocksReport, load: WorkerLoad | None, now: float
    ) -> None:
        worker_id = reported.worker_id
        liveness = self.liveness.get(worker_id)
        if liveness is None or liveness.stream != reported.stream:
            return
        self._perform(self.liveness.handle(reported, now))
        if worker_id not in self.blocks.list_workers():
            reason = "the worker was declared offline; it must attach again and report everything"
            self.refused[reported.stream] = StreamRefused(worker_id, reported.stream, reason)
            return
        if load is not None:
            known = self.loads.get(worker_id)
            load.counts = {**(known.counts if known is not None else {}), **load.counts}
            self.loads[worker_id] = load
        self.blocks.worker_reported(worker_id, report.states, report.removed, report.is_snapshot)
        self._place_and_publish(now)

    def facts_reported(self, reported: WorkerReported, facts: WorkerFacts) -> None:
        liveness = self.liveness.get(reported.worker_id)
        if liveness is not None and liveness.stream == reported.stream:
            self.facts[reported.worker_id] = facts
            self._has_changed = True

    def stream_ended(self, ended: WorkerStreamEnded, now: float) -> None:
        self.refused.pop(ended.stream, None)
        liveness = self.liveness.get(ended.worker_id)
        if liveness is None or liveness.stream != ended.stream:
            return
        self.blocks.worker_detached(ended.worker_id)
        self._perform(self.liveness.handle(ended, now))
        self._place_and_publish(now)

    def remove_worker(self, worker_id: str, now: float) -> None:
        self._perform(self.liveness.handle(WorkerRemoved(worker_id), now))
        self._place_and_publish(now)

    def tick(self, now: float) -> None:
        self._perform(self.liveness.handle(LivenessTick(), now))
        if self.is_adopting and (self.liveness.is_settled or self._have_all_attached()):
            self.blocks.end_adoption()
            self._must_place = self._has_changed = True
        self._place_and_publish(now)

    def set_routes(self, routes: Iterable[NameRoute]) -> None:
        self.publisher.publish_routes(routes)
        self._has_changed = True

    def set_records(self, records: Mapping[str, bytes], prefix: str) -> None:
        """Publish a feature's records, whose keys begin with `prefix`, to gateways."""
        self.publisher.publish_records(records, prefix)
        self._has_changed = True

    def set_access(self, access: AccessView) -> None:
        """Publish the data with which gateways and workers authenticate callers."""
        self.publisher.publish_access(access)
        self._has_changed = True

    # --- queries

    def take_changed(self) -> bool:
        has_changed, self._has_changed = self._has_changed or bool(self.refused), False
        return has_changed

    @property
    def is_adopting(self) -> bool:
        return self.blocks.is_adopting

    def list_present_workers(self) -> PresentWorkers:
        """Return the connected workers, for which the next leader will wait."""
        records = self.liveness.get_records().items()
        return PresentWorkers(worker_ids=tuple(sorted(name for name, liveness in records if liveness.state in PRESENT)))

    def open_direct_endpoint(self, worker_id: str) -> None:
        """Instruct the worker to open its endpoint for direct clients."""
        self.publisher.open_direct_endpoint(worker_id)
        self._has_changed = True

    def get_worker_record(self, worker_id: str) -> WorkerRecord:
        return self._state.workers.get(worker_id) or WorkerRecord()

    def is_draining_or_removed(self, worker_id: str) -> bool:
        """Return whether the worker is draining or was removed."""
        record, liveness = self.get_worker_record(worker_id), self.liveness.get(worker_id)
        return record.is_draining or (liveness is not None and record.removed == liveness.incarnation)

    def find_target_workers(self, block: DeployedBlock) -> list[str]:
        """Return the workers that should hold the block."""
        if block.is_everywhere or self.is_adopting:
            return sorted(self.blocks.find_target_workers(block))
        return sorted(self._placed.get(block.block_id, ()))

    def explain_placement(self, block_id: str) -> list[str]:
        return self._compute_placement().explain(block_id)

    # --- internals

    def _have_all_attached(self) -> bool:
        """Return whether every worker of the previous leader has attached again."""
        return self._expected is not None and self._expected <= self.blocks.list_workers()

    def _perform(self, actions: Iterable[LivenessAction]) -> None:
        for action in actions:
            match action:
                case StreamRefused():
                    self.refused[action.stream] = action
                case LivenessChanged(worker_id, state, _, reason):
                    self.event_drafts.append(EventDraft(f"worker_{state}", worker_id, reason))
                    self._must_place = True
                    if state not in PRESENT:
                        self.blocks.worker_detached(worker_id)  # the process may still run, silently
                        self.publisher.forget_worker(worker_id)
                    if state is LivenessState.FORGOTTEN:
                        self.blocks.worker_forgotten(worker_id)
                        self.facts.pop(worker_id, None)
                        self.publisher.publish_workers_keys(each.curve_key for each in self.facts.values())
                        self.loads.pop(worker_id, None)

    def _place_and_publish(self, now: float | None = None) -> None:
        if self._must_place and not self.is_adopting:
            self._place_blocks(now)
        self._has_changed |= self.publisher.publish_blocks(self.blocks, self._state)

    def _place_blocks(self, now: float | None) -> None:
        """Place blocks that are not on every worker.

        If many workers join a large cluster at once, the next tick places blocks for all new workers together.
        """
        if now is not None and now < self._place_at and len(self._placed) * len(self.liveness.get_records()) > LARGE:
            return
        self._place_at = (now or 0.0) + PLACE_S
        placed = [block.block_id for block in self.blocks.list_assigned_blocks() if not block.is_everywhere]
        holders = self._compute_placement().holders if placed else {}
        self._placed = {block_id: holders[block_id] for block_id in placed}
        self._must_place = False
        self.blocks.set_placement(self._placed)

    def _compute_placement(self) -> Placement:
        """Compute a placement in which workers keep the blocks that they hold or should hold."""
        blocks = self.blocks.list_assigned_blocks()
        held = {
            block.block_id: self._placed.get(block.block_id) or tuple(block.workers)
            for block in blocks
            if not block.is_everywhere
        }
        present = [
            (worker, liveness) for worker, liveness in self.liveness.get_records().items() if liveness.state in PRESENT
        ]
        capacities = [self._build_capacity(worker, liveness) for worker, liveness in present]
        return place_blocks([block.demand for block in blocks], capacities, held)

    def _build_capacity(self, worker_id: str, liveness: LivenessRecord) -> WorkerCapacity:
        facts, record = self.facts.get(worker_id, WorkerFacts()), self.get_worker_record(worker_id)
        return WorkerCapacity(
            worker_id,
            host=facts.node or facts.host,
            machine=f"{facts.node}/{facts.host}",  # workers of a fleet use one node name on several machines
            zone=facts.zone,
            cpu=facts.cpus or inf,
            memory_bytes=facts.memory_bytes or inf,
            gpu_memory_bytes=facts.gpu_memory_bytes,
            shared=facts.shared,
            labels={**facts.labels, **record.labels},
            weight=facts.weight or 1.0,
            is_open=liveness.state is LivenessState.ALIVE,
            is_last_resort=not liveness.is_open,
            is_leaving=self.is_draining_or_removed(worker_id),
        )

    def _update_excluded_workers(self) -> None:
        self.blocks.set_excluded_workers(
            worker for worker in self.liveness.get_records() if self.is_draining_or_removed(worker)
        )
