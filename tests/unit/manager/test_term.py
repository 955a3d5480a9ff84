"""A term by scripts of events: workers join, fall silent, leave and return, and their blocks are placed by deltas."""

import json
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from penstock.core.blocks import BlockRecord, BlockRole, BlockState, WorkerRecord
from penstock.manager.deployed_block import WorkerState
from penstock.manager.desired_state import BLOCKS, PRESENT, ROUTING, WORKERS, DesiredState, encode
from penstock.manager.placing.sites import SharedCapacity
from penstock.manager.publishing.publisher import BLOCK, WORKERS_KEYS, AssignedBlock, WorkersKeys
from penstock.manager.term import BlocksReport, Term, WorkerFacts
from penstock.manager.worker_liveness import LivenessRules, WorkerArrived, WorkerReported, WorkerStreamEnded
from penstock.storage.metadata.metadata_store import Change

RULES = LivenessRules()
BEAT_S = 0.5


class Cluster:
    """A manager's term and its workers, on one clock."""

    def __init__(self, workers: int = 0, is_fresh: bool = True) -> None:
        self.now, self.revision, self.streams = 0.0, 0, 0
        self.state = DesiredState()
        self.term = Term(1, self.state, RULES, self.now, is_fresh)
        self.stream: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.told = 0  # blocks in assignments, added or removed
        for number in range(workers):
            self.arrive(f"w{number}")

    def write(self, *changes: tuple[str, bytes | None]) -> None:
        self.revision += 1
        state_changes = self.state.apply_changes([Change(key, value, self.revision) for key, value in changes])
        self.term.apply_changes(state_changes)

    def deploy(self, *block_ids: str, **fields: Any) -> None:
        record = BlockRecord(model="m", version="1", source="/m", role=BlockRole.CHOSEN, **fields)
        self.write(*((BLOCKS + name, encode(record.model_copy(update={"model": name}))) for name in block_ids))

    def arrive(
        self, worker: str, incarnation: str = "1-life", holds: tuple[str, ...] = (), facts: WorkerFacts | None = None
    ) -> None:
        self.streams += 1
        self.stream[worker] = self.streams
        report = BlocksReport([(block_id, self.ready(block_id)) for block_id in holds])
        arrived = WorkerArrived(worker, incarnation, self.streams)
        self.term.worker_joined(arrived, facts or WorkerFacts(node=f"host-{worker}"), report, self.now)
        self.seen[worker] = 0

    def ready(self, block_id: str) -> WorkerState:
        return WorkerState(BlockState.READY, "", self.state.blocks[block_id].revision, is_serving=True)

    def work(self, *silent: str) -> None:
        """Let every worker, except those in `but`, load its assigned blocks and report them."""
        for worker in self.attached():
            if worker in silent:
                continue
            delta = self.term.publisher.get_assignment(worker).read_since(self.seen[worker])
            self.seen[worker] = delta.revision
            states = [
                (each.block_id, self.ready(each.block_id))
                for each in delta.changed.values()
                if isinstance(each, AssignedBlock)
            ]
            removed = [key.removeprefix(BLOCK) for key in delta.removed]
            self.told += len(states) + len(removed)
            report = BlocksReport(states, removed, is_snapshot=delta.is_snapshot)
            self.term.worker_reported(WorkerReported(worker, self.stream[worker]), report, None, self.now)

    def attached(self) -> list[str]:
        return sorted(self.term.blocks.list_workers())

    def pass_time(self, seconds: float, *silent: str) -> None:
        for _ in range(int(seconds / BEAT_S)):
            self.now += BEAT_S
            self.work(*silent)
            self.term.tick(self.now)

    def holders(self, block_id: str) -> list[str]:
        block = self.term.blocks.get(block_id)
        return sorted(block.workers) if block is not None else []


def test_a_worker_gets_its_blocks_and_no_others() -> None:
    cluster = Cluster(workers=4)
    cluster.deploy("a", "b", "c", "d", replicas=1)
    cluster.deploy("everywhere")
    cluster.work()
    placed = [cluster.holders(name) for name in "abcd"]
    assert sorted(worker for holders in placed for worker in holders) == ["w0", "w1", "w2", "w3"]
    assert cluster.holders("everywhere") == ["w0", "w1", "w2", "w3"]


def test_one_change_among_many_blocks_and_workers_is_one_update() -> None:
    cluster = Cluster(workers=100)
    for first in range(0, 1000, 100):
        cluster.deploy(*(f"blk-{number}" for number in range(first, first + 100)), replicas=2)
    cluster.work()
    cluster.work()
    assert cluster.told == 2000, "each block is assigned to two workers, in one update each"
    view = cluster.term.publisher.view
    seen, cluster.told = view.revision, 0
    cluster.deploy("one-more", replicas=1)
    cluster.work()
    assert cluster.told == 1
    assert set(view.read_since(seen).changed) == {"block/one-more"}
    cluster.work()
    assert cluster.told == 1, "only one update is published"
    moved = [move for move in range(1000) if len(cluster.holders(f"blk-{move}")) != 2]
    assert moved == []


def test_blocks_of_a_silent_worker_are_placed_elsewhere() -> None:
    cluster = Cluster(workers=3)
    cluster.deploy("a", replicas=2)
    cluster.work()
    lost, kept = cluster.holders("a")
    cluster.pass_time(RULES.suspect_s + BEAT_S, lost)
    assert cluster.holders("a") == [lost, kept], "the lost worker may come back"
    cluster.pass_time(RULES.offline_s, lost)
    assert len(cluster.holders("a")) == 2
    assert lost not in cluster.holders("a")
    assert [notice.kind for notice in cluster.term.event_drafts if notice.subject == lost] == [
        "worker_alive",
        "worker_suspect",
        "worker_offline",
    ]


def test_a_worker_that_returns_from_silence_reports_everything_again() -> None:
    cluster = Cluster(workers=2)
    cluster.deploy("a")
    cluster.work()
    cluster.pass_time(RULES.offline_s + 1, "w0")
    assert cluster.holders("a") == ["w1"]
    cluster.term.worker_reported(
        WorkerReported("w0", cluster.stream["w0"]), BlocksReport([], is_snapshot=False), None, cluster.now
    )
    assert "report everything" in cluster.term.refused[cluster.stream["w0"]].reason
    cluster.term.stream_ended(WorkerStreamEnded("w0", cluster.stream["w0"]), cluster.now)
    cluster.arrive("w0", holds=("a",))
    assert cluster.holders("a") == ["w0", "w1"]


def test_a_short_connection_loss_moves_nothing() -> None:
    cluster = Cluster(workers=3)
    cluster.deploy("a", replicas=1)
    cluster.work()
    (holder,) = cluster.holders("a")
    cluster.term.stream_ended(WorkerStreamEnded(holder, cluster.stream[holder]), cluster.now)
    cluster.pass_time(1.0)
    cluster.told = 0
    cluster.arrive(holder, holds=("a",))
    cluster.pass_time(10.0)
    assert cluster.holders("a") == [holder]
    assert cluster.told <= 1, "the worker may get an update that it has already"


def test_a_leaving_worker_is_removed_at_once() -> None:
    cluster = Cluster(workers=2)
    cluster.deploy("a", replicas=1)
    cluster.work()
    (holder,) = cluster.holders("a")
    cluster.term.stream_ended(WorkerStreamEnded(holder, cluster.stream[holder], has_left=True), cluster.now)
    cluster.work()
    assert cluster.holders("a") == [{"w0": "w1", "w1": "w0"}[holder]]


def test_a_new_process_of_a_worker_holds_nothing_of_the_old_one() -> None:
    cluster = Cluster(workers=1)
    cluster.deploy("a")
    cluster.work()
    cluster.term.stream_ended(WorkerStreamEnded("w0", cluster.stream["w0"]), cluster.now)
    cluster.arrive("w0", "2-life")
    assert cluster.holders("a") == []
    cluster.work()
    assert cluster.holders("a") == ["w0"]


def test_a_drained_worker_serves_until_others_do() -> None:
    cluster = Cluster(workers=2)
    cluster.deploy("a", replicas=1)
    cluster.work()
    (holder,) = cluster.holders("a")
    cluster.write((WORKERS + holder, encode(WorkerRecord(is_draining=True))))
    block = cluster.term.blocks.get("a")
    assert block is not None
    assert len(cluster.term.blocks.find_assigned_workers(block)) == 2
    cluster.work()
    cluster.work()
    assert cluster.holders("a") == [{"w0": "w1", "w1": "w0"}[holder]]


def test_a_new_leader_leaves_held_blocks_where_they_are() -> None:
    before = Cluster(workers=4)
    before.deploy(*(f"blk-{number}" for number in range(40)), replicas=2)
    before.work()
    held = {
        worker: tuple(f"blk-{n}" for n in range(40) if worker in before.holders(f"blk-{n}")) for worker in before.seen
    }
    after = Cluster(is_fresh=False)
    after.state, after.revision = before.state, before.revision
    after.term = Term(2, before.state, RULES, 0.0)
    for worker in ("w0", "w1", "w2"):  # the fourth worker died in between
        after.arrive(worker, holds=held[worker])
        after.work()
    assert all(len(after.holders(f"blk-{n}")) == len({*before.holders(f"blk-{n}")} - {"w3"}) for n in range(40))
    after.pass_time(RULES.offline_s + 1)
    assert all(len(after.holders(f"blk-{n}")) == 2 for n in range(40)), (
        "the blocks of the lost worker are placed elsewhere"
    )
    moved = [each for worker in ("w0", "w1", "w2") for each in held[worker] if worker not in after.holders(each)]
    assert len(moved) <= 4, "a few blocks may move to balance the load"


def test_blocks_assigned_to_a_new_worker_are_withdrawn_before_its_first_report() -> None:
    cluster = Cluster()
    cluster.deploy("a")
    cluster.arrive("w0")
    record = cluster.state.blocks["a"].record
    withdrawn = record.model_copy(update={"role": BlockRole.WITHDRAWN, "generation": 1})
    cluster.write((BLOCKS + "a", encode(withdrawn)))
    assert "block/a" not in cluster.term.publisher.get_assignment("w0").get_items()


# --- random events


class Chaos(Cluster):
    """Random events in random order."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        super().__init__(is_fresh=self.random.random() < 0.5)
        self.says: dict[str, dict[str, WorkerState]] = {}

    def step(self) -> None:
        self.now += self.random.choice((0.0, 0.1, 1.0))
        worker, model = f"w{self.random.randrange(4)}", f"m{self.random.randrange(3)}"
        steps = (self.deploy_some, self.come, self.report, self.report, self.report, self.go, self.drain, self.delete)
        self.random.choice(steps)(worker, model)
        if self.random.random() < 0.2:
            self.term.tick(self.now)

    def deploy_some(self, _: str, model: str) -> None:
        fields = self.random.choice(({}, {"replicas": 1}, {"replicas": 2}, {"anti_affinity": ("m0",)}))
        chosen = self.random.randint(1, 3)
        for version in range(1, 4):
            known = self.state.find_block(model, str(version))
            role = self.random.choice((BlockRole.SPARE, BlockRole.WITHDRAWN)) if version != chosen else BlockRole.CHOSEN
            generation = known.revision if known is not None and version != chosen else 0
            record = BlockRecord(model=model, version=str(version), source="/m", role=role, **fields)
            self.write(
                (f"{BLOCKS}{model}-{version}", encode(record.model_copy(update={"generation": generation}))),
                (f"{ROUTING}{model}", self.random.choice((None, b"{}"))),
            )

    def delete(self, _: str, model: str) -> None:
        self.write((f"{BLOCKS}{model}-{self.random.randint(1, 3)}", None))

    def drain(self, worker: str, _: str) -> None:
        self.write((WORKERS + worker, encode(WorkerRecord(is_draining=self.random.random() < 0.5))))

    def come(self, worker: str, _: str) -> None:
        holds = [block_id for block_id in self.state.blocks if self.random.random() < 0.4]
        self.arrive(worker, f"{self.random.randrange(3)}-life", tuple(holds))

    def go(self, worker: str, _: str) -> None:
        ended = WorkerStreamEnded(worker, self.stream.get(worker, 0), self.random.random() < 0.3)
        self.term.stream_ended(ended, self.now)

    def report(self, worker: str, _: str) -> None:
        if worker in self.term.blocks.list_workers():
            given = {key.removeprefix(BLOCK) for key in self.term.publisher.get_assignment(worker).get_items()}
            names = [name for name in self.state.blocks if self.random.random() < 0.6]
            states = [(name, self.some_state(name)) for name in names if name in given]
            removed = [name for name in names if name not in given]
            report = BlocksReport(states, removed, is_snapshot=self.random.random() < 0.2)
            self.term.worker_reported(WorkerReported(worker, self.stream[worker]), report, None, self.now)

    def some_state(self, block_id: str) -> WorkerState:
        state = self.random.choice((BlockState.READY, BlockState.READY, BlockState.FAILED, *BlockState))
        revision = self.state.blocks[block_id].revision - self.random.choice((0, 0, 0, 1))
        return WorkerState(state, "why", revision, state is BlockState.READY, self.random.random() < 0.2)

    def revisions(self) -> list[int]:
        publisher = self.term.publisher
        return [publisher.view.revision, *(publisher.get_assignment(worker).revision for worker in self.attached())]


def test_deltas_give_the_same_state_as_sending_everything() -> None:
    for seed in range(40):
        chaos = Chaos(seed)
        for _ in range(50):
            chaos.step()
            before, registry = chaos.revisions(), chaos.term.blocks
            for block in registry.list_blocks():
                registry.mark_stale(block.model)
                anew = replace(block, workers={}, _state_counts=Counter(), _serving=0)
                anew.role = block.role
                for worker, said in block.workers.items():
                    anew.report(worker, said)
                assert anew.compute_state() == block.compute_state()
            chaos.term.publisher.publish_blocks(registry, chaos.state)
            assert chaos.revisions() == before


def test_operators_labels_take_precedence_over_a_workers_own() -> None:
    cluster = Cluster(workers=2)
    cluster.write((WORKERS + "w1", json.dumps({"labels": {"disk": "ssd"}}).encode()))
    cluster.deploy("a", replicas=1, labels={"disk": "ssd"})
    cluster.work()
    assert cluster.holders("a") == ["w1"]


def test_a_workers_facts_about_itself_and_its_machine_affect_placement() -> None:
    cluster = Cluster()
    machine = (SharedCapacity("h1", cpus=4),)
    cluster.arrive("w0", facts=WorkerFacts(node="h1", cpus=4, shared=machine))
    cluster.arrive("w1", facts=WorkerFacts(node="h1", cpus=4, shared=machine, weight=3))
    names = [f"blk-{number}" for number in range(8)]
    cluster.deploy(*names, replicas=1)
    cluster.deploy("a", "b", replicas=1, resources={"cpu": 3})
    cluster.work()
    assert len([name for name in names if cluster.holders(name) == ["w1"]]) >= 5
    assert sorted([len(cluster.holders("a")), len(cluster.holders("b"))]) == [0, 1]
    assert "1 of 4 are free on its machine" in " ".join(
        cluster.term.explain_placement("a") + cluster.term.explain_placement("b")
    )


def test_workers_that_attach_to_a_new_leader_keep_their_blocks() -> None:
    before = Cluster(workers=60)
    before.deploy(*(f"blk-{number}" for number in range(100)), replicas=3)
    before.work()
    held = {worker: [f"blk-{n}" for n in range(100) if worker in before.holders(f"blk-{n}")] for worker in before.seen}
    after = Cluster()
    after.state = before.state
    after.term = Term(2, before.state, RULES, 0.0)
    for worker in before.seen:
        after.arrive(worker, holds=tuple(held[worker]))
        given = after.term.publisher.get_assignment(worker).get_items()
        assert {f"block/{block_id}" for block_id in held[worker]} <= given.keys(), "no worker has to remove a block"
    after.pass_time(RULES.offline_s + 1)
    assert all(len(after.holders(f"blk-{n}")) == 3 for n in range(100))
    assert all(after.holders(f"blk-{n}") == before.holders(f"blk-{n}") for n in range(100))


def test_a_worker_that_was_only_silent_is_not_blamed_for_loading() -> None:
    cluster = Cluster(workers=1)
    cluster.deploy("a")
    cluster.work()
    record = BlockRecord(model="a", version="2", source="/m", role=BlockRole.CHOSEN)
    old = BlockRecord(model="a", version="1", source="/m", role=BlockRole.SPARE, generation=1)
    cluster.write((BLOCKS + "a", encode(old)), (BLOCKS + "b", encode(record)))
    new = cluster.term.blocks.get("b")
    assert new is not None
    assert new.is_new
    for _ in range(3):  # it loads, and its loop does not run meanwhile
        cluster.pass_time(RULES.offline_s + 1, "w0")
        cluster.term.stream_ended(WorkerStreamEnded("w0", cluster.stream["w0"]), cluster.now)
        cluster.arrive("w0", holds=("a",))
    assert not new.is_given_up
    cluster.work()
    assert cluster.holders("b") == ["w0"]


def test_a_new_leader_waits_only_for_known_workers() -> None:
    before = Cluster(workers=2)
    before.deploy("a", "b", "c", replicas=1)
    before.work()
    before.write((PRESENT, encode(before.term.list_present_workers())))
    held = {worker: tuple(name for name in "abc" if worker in before.holders(name)) for worker in ("w0", "w1")}
    after = Cluster()
    after.state = before.state
    after.term = Term(2, before.state, RULES, 0.0)
    after.arrive("w0", holds=held["w0"])
    after.pass_time(1.0)
    assert after.term.is_adopting
    after.arrive("w1", holds=held["w1"])
    after.pass_time(BEAT_S)
    assert not after.term.is_adopting
    assert all(after.holders(name) == before.holders(name) for name in "abc")


def test_gateways_get_the_keys_of_current_workers() -> None:
    cluster = Cluster()

    def told() -> tuple[str, ...]:
        shown = cluster.term.publisher.view.get_items()[WORKERS_KEYS]
        assert isinstance(shown, WorkersKeys)
        return shown.keys

    assert told() == ()
    cluster.arrive("w0", facts=WorkerFacts(curve_key="aa"))
    cluster.arrive("w1", facts=WorkerFacts(curve_key="bb"))
    assert told() == ("aa", "bb")
    cluster.term.stream_ended(WorkerStreamEnded("w0", cluster.stream["w0"], False), cluster.now)
    assert told() == ("aa", "bb")  # it may return at once
    cluster.now += RULES.reconnect_s + 1.0
    cluster.term.tick(cluster.now)
    cluster.arrive("w0", "2-life", facts=WorkerFacts(curve_key="cc"))
    assert told() == ("bb", "cc")
    cluster.term.remove_worker("w1", cluster.now)
    assert told() == ("cc",)
