"""What a manager knows while it leads: which workers live, what they hold, who should hold what. Decides; never acts.

A manager that does not lead has one, too, in which no workers come: with it, it answers what only reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from penstock.core.blocks import WorkerRecord
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.devices import WorkerDevice
from penstock.core.generation import GenerationStanding
from penstock.core.routes import NameRoute
from penstock.manager.deployed_block import DeployedBlock, WorkerState
from penstock.manager.desired import DesiredState, Folded, PresentWorkers
from penstock.manager.lives import (
    Life,
    LifeAction,
    LifeChanged,
    LifeRules,
    LifeState,
    Lives,
    LivesTurn,
    StreamRefused,
    WorkerArrived,
    WorkerHeard,
    WorkerRemoved,
    WorkerStreamEnded,
)
from penstock.manager.placing.placement import Placement, place
from penstock.manager.placing.sites import SharedCapacity, WorkerCapacity
from penstock.manager.registry import Registry
from penstock.manager.telling.boards import Boards

PRESENT = (LifeState.ALIVE, LifeState.SUSPECT)
LARGE = 5000  # blocks times workers
PLACE_S = 0.5  # between two placements of a large cluster


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker tells of itself when it joins."""

    node: str = ""  # the machine that it runs on
    host: str = ""  # boot id and pid namespace
    zone: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 0.0  # 0: nobody knows
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    version: str = ""
    shared: tuple[SharedCapacity, ...] = ()
    weight: float = 1.0  # what it can do beside the others
    pid: int = 0
    curve_key: str = ""  # of its process, public
    door: str = ""  # where clients reach it; empty: nowhere; port 0: it is opened when asked for
    is_door_tls: bool = False


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Since the worker's incarnation began."""

    requests: int = 0
    errors: int = 0
    latency_s: float = 0.0
    generation: GenerationStanding | None = None  # of one that generates text


@dataclass(slots=True)
class Load:
    cpu: float = 0.0  # cores
    memory_bytes: int = 0
    gpu: float | None = None  # share of the time
    gpu_memory_bytes: int | None = None
    jobs: int = 0
    waiting: int = 0
    busy: int = 0  # instances
    instances: int = 0
    counts: dict[str, BlockCount] = field(default_factory=dict)  # by block
    devices: Sequence[WorkerDevice] = ()


class Report(NamedTuple):
    states: Iterable[tuple[str, WorkerState]]
    removed: Iterable[str] = ()
    is_snapshot: bool = True


class Notice(NamedTuple):
    """Something that an operator may want to know later."""

    kind: str
    subject: str
    text: str


class Reign:
    def __init__(self, epoch: int, state: DesiredState, rules: LifeRules, now: float, is_fresh: bool = False) -> None:
        """`is_fresh`: nobody lives whom an earlier manager told anything."""
        self.epoch = epoch
        self.registry = Registry(is_adopting=not is_fresh)
        self.lives = Lives(rules, now)
        self.boards = Boards()
        self.facts: dict[str, Facts] = {}
        self.loads: dict[str, Load] = {}
        self.refused: dict[int, StreamRefused] = {}  # streams that are to be ended
        self.notices: list[Notice] = []
        self._state = state
        self._expected = None if state.present is None else frozenset(state.present.worker_ids)
        self._placed: dict[str, tuple[str, ...]] = {}
        self._must_place = True
        self._place_at = 0.0
        self._has_news = False
        for model in {block.record.model for block in state.blocks.values()}:
            self.registry.apply(model, state.of_model(model))
        self._close_workers()
        self.boards.gateways_changed(state)
        self.boards.workers_keys_changed(())
        self._settle()

    # --- what happens

    def fold(self, folded: Folded) -> None:
        for model in folded.models:
            self.registry.apply(model, self._state.of_model(model))
        for model in folded.routings:
            self.registry.touch(model)
        if folded.has_gateways:
            self.boards.gateways_changed(self._state)
        if folded.workers:
            self._close_workers()
        self._must_place = self._must_place or bool(folded.models or folded.workers)
        self._settle()

    def arrive(self, arrived: WorkerArrived, facts: Facts, report: Report, now: float) -> None:
        """The first report of a stream. Where another speaks for the worker, the stream is refused."""
        worker_id = arrived.worker_id
        record = self._state.workers.get(worker_id)
        if record is not None and record.removed == arrived.incarnation:
            reason = "an operator removed this worker; start it anew to have it back"
            self.refused[arrived.stream] = StreamRefused(worker_id, arrived.stream, reason)
            return
        before = self.lives.get(worker_id)
        earlier = before.incarnation if before is not None else arrived.incarnation
        self._perform(self.lives.handle(arrived, now))
        if arrived.stream in self.refused:
            return
        if earlier != arrived.incarnation:
            self.registry.worker_left(worker_id)  # of its earlier process nothing is left
            self.loads.pop(worker_id, None)
        self.facts[worker_id] = facts
        self.boards.workers_keys_changed(each.curve_key for each in self.facts.values())
        self._close_workers()
        self.registry.worker_reported(worker_id, report.states, report.removed, is_snapshot=True)
        self._must_place = True
        self._settle(now)

    def hear(self, heard: WorkerHeard, report: Report, load: Load | None, now: float) -> None:
        worker_id = heard.worker_id
        life = self.lives.get(worker_id)
        if life is None or life.stream != heard.stream:
            return
        self._perform(self.lives.handle(heard, now))
        if worker_id not in self.registry.workers():
            reason = "it was taken for dead meanwhile: it is to tell everything again"
            self.refused[heard.stream] = StreamRefused(worker_id, heard.stream, reason)
            return
        if load is not None:
            known = self.loads.get(worker_id)
            load.counts = {**(known.counts if known is not None else {}), **load.counts}
            self.loads[worker_id] = load
        self.registry.worker_reported(worker_id, report.states, report.removed, report.is_snapshot)
        self._settle(now)

    def learn(self, heard: WorkerHeard, facts: Facts) -> None:
        """Of a worker that is another than it said before."""
        life = self.lives.get(heard.worker_id)
        if life is not None and life.stream == heard.stream:
            self.facts[heard.worker_id] = facts
            self._has_news = True

    def end(self, ended: WorkerStreamEnded, now: float) -> None:
        self.refused.pop(ended.stream, None)
        life = self.lives.get(ended.worker_id)
        if life is None or life.stream != ended.stream:
            return
        self.registry.worker_detached(ended.worker_id)
        self._perform(self.lives.handle(ended, now))
        self._settle(now)

    def remove(self, worker_id: str, now: float) -> None:
        self._perform(self.lives.handle(WorkerRemoved(worker_id), now))
        self._settle(now)

    def turn(self, now: float) -> None:
        self._perform(self.lives.handle(LivesTurn(), now))
        if self.is_adopting and (self.lives.is_settled or self._are_all_here()):
            self.registry.end_adoption()
            self._must_place = self._has_news = True
        self._settle(now)

    def set_routes(self, routes: Iterable[NameRoute]) -> None:
        """What names resolve to where rollouts say so."""
        self.boards.routes_changed(routes)
        self._has_news = True

    def set_access(self, access: AccessView) -> None:
        """How gateways know callers."""
        self.boards.access_changed(access)
        self._has_news = True

    # --- what others ask

    def take_news(self) -> bool:
        """Whether anything is another since this was last asked."""
        has_news, self._has_news = self._has_news or bool(self.refused), False
        return has_news

    @property
    def is_adopting(self) -> bool:
        return self.registry.is_adopting

    def present(self) -> PresentWorkers:
        """Whom a successor may expect."""
        lives = self.lives.items().items()
        return PresentWorkers(worker_ids=tuple(sorted(name for name, life in lives if life.state in PRESENT)))

    def open_door(self, worker_id: str) -> None:
        """Clients want to reach it."""
        self.boards.open_door(worker_id)
        self._has_news = True

    def record(self, worker_id: str) -> WorkerRecord:
        return self._state.workers.get(worker_id) or WorkerRecord()

    def is_closed(self, worker_id: str) -> bool:
        """It drains, or was removed."""
        record, life = self.record(worker_id), self.lives.get(worker_id)
        return record.is_draining or (life is not None and record.removed == life.incarnation)

    def placed(self, block: DeployedBlock) -> list[str]:
        """The workers that should hold it."""
        if block.is_everywhere or self.is_adopting:
            return sorted(self.registry.targets(block))
        return sorted(self._placed.get(block.block_id, ()))

    def explain(self, block_id: str) -> list[str]:
        return self._place().explain(block_id)

    # --- how it follows

    def _are_all_here(self) -> bool:
        """Those whom the manager before had."""
        return self._expected is not None and self._expected <= self.registry.workers()

    def _perform(self, actions: Iterable[LifeAction]) -> None:
        for action in actions:
            match action:
                case StreamRefused():
                    self.refused[action.stream] = action
                case LifeChanged(worker_id, state, _, reason):
                    self.notices.append(Notice(f"worker_{state}", worker_id, reason))
                    self._must_place = True
                    if state not in PRESENT:
                        self.registry.worker_detached(worker_id)  # of its process nobody knows: it may only be silent
                        self.boards.forget(worker_id)
                    if state is LifeState.FORGOTTEN:
                        self.registry.worker_forgotten(worker_id)
                        self.facts.pop(worker_id, None)
                        self.boards.workers_keys_changed(each.curve_key for each in self.facts.values())
                        self.loads.pop(worker_id, None)

    def _settle(self, now: float | None = None) -> None:
        if self._must_place and not self.is_adopting:
            self._place_picky(now)
        self._has_news |= self.boards.publish(self.registry, self._state)

    def _place_picky(self, now: float | None) -> None:
        """A large cluster is not placed anew for each of many that come at once: the next turn does it for all."""
        if now is not None and now < self._place_at and len(self._placed) * len(self.lives.items()) > LARGE:
            return
        self._place_at = (now or 0.0) + PLACE_S
        picky = [block.block_id for block in self.registry.assigned() if not block.is_everywhere]
        holders = self._place().holders if picky else {}
        self._placed = {block_id: holders[block_id] for block_id in picky}
        self._must_place = False
        self.registry.place(self._placed)

    def _place(self) -> Placement:
        """Those who were to hold a block keep it."""
        blocks = self.registry.assigned()
        held = {
            block.block_id: self._placed.get(block.block_id) or tuple(block.workers)
            for block in blocks
            if not block.is_everywhere
        }
        present = [(worker, life) for worker, life in self.lives.items().items() if life.state in PRESENT]
        capacities = [self._capacity(worker, life) for worker, life in present]
        return place([block.demand for block in blocks], capacities, held)

    def _capacity(self, worker_id: str, life: Life) -> WorkerCapacity:
        facts, record = self.facts.get(worker_id, Facts()), self.record(worker_id)
        return WorkerCapacity(
            worker_id,
            host=facts.node or facts.host,
            machine=f"{facts.node}/{facts.host}",  # a fleet's workers are of one name, on many machines
            zone=facts.zone,
            cpu=facts.cpus or inf,
            memory_bytes=facts.memory_bytes or inf,
            gpu_memory_bytes=facts.gpu_memory_bytes,
            shared=facts.shared,
            labels={**facts.labels, **record.labels},
            weight=facts.weight or 1.0,
            is_open=life.state is LifeState.ALIVE,
            is_last=not life.is_open,
            is_leaving=self.is_closed(worker_id),
        )

    def _close_workers(self) -> None:
        self.registry.close(worker for worker in self.lives.items() if self.is_closed(worker))
