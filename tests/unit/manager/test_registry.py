"""The registry: wanted blocks, workers' reports, what is settled, and how one version gives way to another."""

from typing import Any

import pytest

from penstock.core.blocks import BlockRecord, BlockRole, BlockState
from penstock.manager.deployed_block import WorkerState
from penstock.manager.desired import DesiredBlock
from penstock.manager.registry import Registry

READY, FAILED, LOADING = BlockState.READY, BlockState.FAILED, BlockState.LOADING
UNLOADED, DORMANT = BlockState.UNLOADED, BlockState.DORMANT


class Cluster:
    """A registry with one model, and workers that say how far they are with it."""

    def __init__(self, *workers: str) -> None:
        self.registry = Registry()
        self.revision = 0
        self.records: dict[int, DesiredBlock] = {}  # by version
        self.said: dict[str, dict[str, WorkerState]] = {worker: {} for worker in workers}
        for worker in workers:
            self.say(worker)

    def is_settled(self, model: str) -> bool:
        """Every worker has answered the newest revision of what was chosen, well or badly; what went has gone."""
        return self.registry.has_answered(model) and self.registry.has_gone(model)

    def deploy(self, *versions: int, spares: tuple[int, ...] = ()) -> None:
        """As the manager writes it: what serves keeps its revision, whatever its role is now."""
        self.revision += 1
        for version in {*self.records, *versions, *spares}:
            role = BlockRole.CHOSEN if version in versions else BlockRole.SPARE
            role = role if version in (*versions, *spares) else BlockRole.WITHDRAWN
            block = self.registry.get(f"blk-{version}")
            is_kept = version not in versions and block is not None and block.is_wanted and block.is_taken_up
            self.write(version, role, self.records[version].revision if is_kept else self.revision)
        self.apply()

    def unload(self) -> None:
        for version, block in self.records.items():
            self.write(version, BlockRole.WITHDRAWN, block.revision)
        self.apply()

    def write(self, version: int, role: BlockRole, revision: int, **fields: Any) -> None:
        record = BlockRecord(model="m", version=str(version), source="/m", role=role, **fields)
        self.records[version] = DesiredBlock(f"blk-{version}", record, revision)

    def apply(self) -> None:
        self.registry.apply("m", list(self.records.values()))

    def say(self, worker: str, version: int = 0, state: BlockState | None = None, reason: str = "") -> None:
        """How far the worker is with the version's newest revision; without a state it has let go of it."""
        said = self.said.setdefault(worker, {})
        if state is not None:
            (block,) = [block for block in self.registry.blocks() if block.version == str(version)]
            before = said.get(block.block_id)
            is_serving = state is READY or (before is not None and before.is_serving)
            said[block.block_id] = WorkerState(state, reason, block.revision, is_serving)
        else:
            said.pop(f"blk-{version}", None)
        self.registry.worker_reported(worker, said.items())

    def serve(self, *versions: int) -> None:
        """They are loaded everywhere, and nobody holds another."""
        for worker in self.said:
            for block in self.registry.blocks():
                self.say(worker, int(block.version), READY if int(block.version) in versions else None)

    def leave(self, worker: str) -> None:
        del self.said[worker]
        self.registry.worker_left(worker)

    def states(self) -> dict[str, BlockState]:
        return {block.version: block.state()[0] for block in self.registry.shown()}

    def assigned(self) -> list[str]:
        return [block.version for block in self.registry.assigned()]


def test_a_block_goes_from_loading_to_ready() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    (block,) = cluster.registry.blocks()
    assert block.state() == (LOADING, "loading")
    report = [("blk-1", WorkerState(READY, "", 1, is_serving=True))]
    assert cluster.registry.worker_reported("w", report)
    assert block.state() == (READY, "")
    assert not cluster.registry.worker_reported("w", report)
    assert cluster.is_settled("m")


def test_one_ready_worker_is_enough_and_all_failed_is_failed() -> None:
    cluster = Cluster("w1", "w2")
    cluster.deploy(1)
    (block,) = cluster.registry.blocks()
    cluster.say("w1", 1, FAILED, "no")
    assert block.state() == (FAILED, "no")
    cluster.say("w2", 1, READY)
    assert block.state() == (READY, "serves, but was not loaded anew: no")
    cluster.leave("w2")
    assert block.state() == (FAILED, "no")
    assert cluster.registry.failure("m") == "version 1 failed to load: no"


def test_a_new_revision_is_settled_only_when_answered_and_the_old_one_is_ready_meanwhile() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(1)
    assert not cluster.is_settled("m")
    cluster.say("w", 1, LOADING)
    assert not cluster.is_settled("m")
    assert cluster.states() == {"1": READY}
    cluster.say("w", 1, READY)
    assert cluster.is_settled("m")


def test_a_revision_that_does_not_load_leaves_the_block_ready_and_is_told() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(1)
    cluster.say("w", 1, FAILED, "no model")
    assert cluster.is_settled("m")
    assert cluster.registry.blocks()[0].state() == (READY, "serves, but was not loaded anew: no model")
    assert cluster.registry.failure("m") == (
        "version 1 failed to load: no model; what served before serves on (version 1)"
    )


def test_withdrawn_is_settled_when_nobody_holds_it() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.unload()
    assert cluster.assigned() == []
    assert not cluster.is_settled("m")
    cluster.say("w", 1)
    assert cluster.is_settled("m")
    assert cluster.states() == {"1": UNLOADED}


def test_a_dormant_block_is_settled_and_counts_until_some_worker_has_it() -> None:
    cluster = Cluster("w1")
    cluster.deploy(1)
    (block,) = cluster.registry.blocks()
    cluster.say("w1", 1, DORMANT)
    assert block.state() == (DORMANT, "")
    assert cluster.is_settled("m")
    assert cluster.registry.failure("m") == ""
    cluster.say("w2", 1, FAILED, "no")
    assert block.state() == (DORMANT, ""), "the other worker can still load it"
    cluster.say("w1", 1, READY)
    assert block.state()[0] is READY


# --- from one version to another


def replaced() -> Cluster:
    """Version 1 serves on both workers, and version 2 was chosen."""
    cluster = Cluster("w1", "w2")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(2)
    return cluster


def test_the_old_version_goes_when_every_worker_has_the_new_one() -> None:
    cluster = replaced()
    assert cluster.assigned() == ["1", "2"]
    assert cluster.states() == {"1": READY, "2": LOADING}
    cluster.say("w1", 2, READY)
    assert cluster.states() == {"1": READY, "2": LOADING}, "the other worker does not have it yet"
    cluster.say("w2", 2, READY)
    assert cluster.states() == {"1": UNLOADED, "2": READY}
    assert cluster.assigned() == ["2"]
    assert cluster.registry.has_answered("m")
    assert not cluster.is_settled("m"), "the old one is still there"
    cluster.serve(2)
    assert cluster.is_settled("m")


@pytest.mark.parametrize("is_on_one", [True, False])
def test_a_version_that_does_not_load_everywhere_leaves_the_old_one_serving(is_on_one: bool) -> None:
    cluster = replaced()
    cluster.say("w1", 2, READY if is_on_one else FAILED, "" if is_on_one else "broken")
    cluster.say("w2", 2, FAILED, "broken")
    assert cluster.registry.has_answered("m")
    assert cluster.states() == {"1": READY, "2": FAILED}
    assert cluster.assigned() == ["1", "2"]
    assert cluster.registry.failure("m") == (
        "version 2 failed to load: broken; what served before serves on (version 1)"
    )


def test_a_worker_that_returns_while_the_new_version_is_broken_gets_the_old_one_first() -> None:
    cluster = replaced()
    for worker in ("w1", "w2"):
        cluster.say(worker, 2, FAILED, "broken")
    cluster.leave("w1")
    assert cluster.states() == {"1": READY, "2": FAILED}
    cluster.say("w1")
    assert cluster.assigned() == ["1", "2"]
    cluster.say("w1", 1, READY)
    cluster.say("w1", 2, FAILED, "broken")
    assert cluster.states() == {"1": READY, "2": FAILED}


def test_a_good_version_after_a_broken_one_replaces_the_old_one() -> None:
    cluster = replaced()
    for worker in ("w1", "w2"):
        cluster.say(worker, 2, FAILED, "broken")
    cluster.deploy(3)
    assert cluster.assigned() == ["1", "3"], "nobody needs the broken one"
    cluster.serve(1, 3)
    assert cluster.states() == {"1": UNLOADED, "2": UNLOADED, "3": READY}


def test_the_same_version_mended_replaces_the_old_one() -> None:
    cluster = replaced()
    for worker in ("w1", "w2"):
        cluster.say(worker, 2, FAILED, "broken")
    cluster.deploy(2)
    assert cluster.states() == {"1": READY, "2": LOADING}
    cluster.serve(1, 2)
    assert cluster.states() == {"1": UNLOADED, "2": READY}


def test_back_to_an_old_version_is_a_change_like_any_other() -> None:
    cluster = replaced()
    cluster.serve(1, 2)
    cluster.serve(2)
    cluster.deploy(1)
    assert cluster.states() == {"1": LOADING, "2": READY}
    cluster.serve(1, 2)
    assert cluster.states() == {"1": READY, "2": UNLOADED}


def test_a_worker_that_dies_in_the_middle_does_not_hold_up_the_others() -> None:
    cluster = replaced()
    cluster.say("w1", 2, READY)
    cluster.leave("w2")
    assert cluster.states() == {"1": UNLOADED, "2": READY}
    cluster.say("w2")
    assert cluster.assigned() == ["2"]


def test_without_any_worker_nothing_is_replaced() -> None:
    cluster = replaced()
    cluster.say("w1", 2, READY)
    cluster.said["w2"] = {}
    cluster.say("w2")
    cluster.leave("w1")
    cluster.leave("w2")
    assert cluster.states() == {"1": LOADING, "2": LOADING}
    assert cluster.assigned() == ["1", "2"]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_version_whose_load_ends_workers_is_given_up(is_told: bool) -> None:
    cluster = replaced()
    for worker in ("w1", "w2"):
        if is_told:
            cluster.say(worker, 2, LOADING)
        cluster.leave(worker)
    assert cluster.assigned() == ["1"]
    cluster.say("w1", 1, READY)
    assert cluster.states() == {"1": READY, "2": FAILED}
    assert cluster.registry.has_answered("m")
    assert "worker processes ended" in cluster.registry.failure("m")
    cluster.deploy(2)
    assert cluster.assigned() == ["1", "2"], "whoever loads it again has it tried again"


def test_versions_that_stay_are_not_in_doubt_while_others_come_and_go() -> None:
    cluster = Cluster("w")
    cluster.deploy(1, 2)
    cluster.serve(1, 2)
    cluster.deploy(2, 3)
    cluster.say("w", 2, LOADING)
    assert cluster.states() == {"1": READY, "2": READY, "3": LOADING}
    cluster.say("w", 2, READY)
    cluster.say("w", 3, READY)
    assert cluster.states() == {"1": UNLOADED, "2": READY, "3": READY}


def test_a_version_beside_others_is_asked_when_every_worker_has_it() -> None:
    cluster = Cluster("w1", "w2")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(1, 2)
    (new,) = [block for block in cluster.registry.assigned() if block.is_new]
    assert (new.version, new.replaces) == ("2", ())
    cluster.say("w1", 2, READY)
    assert cluster.states() == {"1": READY, "2": LOADING}
    cluster.say("w2", 2, READY)
    assert cluster.states() == {"1": READY, "2": READY}


def test_versions_that_come_together_at_the_start_are_asked_as_they_come() -> None:
    cluster = Cluster("w1", "w2")
    cluster.deploy(1, 2)
    cluster.say("w1", 1, READY)
    cluster.say("w1", 2, READY)
    assert cluster.states() == {"1": READY, "2": READY}


def test_what_never_served_does_not_stand_in() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.deploy(2)
    assert cluster.assigned() == ["2"]


def test_where_the_latest_does_not_load_at_the_start_the_one_before_serves() -> None:
    cluster = Cluster("w1", "w2")
    cluster.deploy(3, spares=(2, 1))
    cluster.say("w1", 3, FAILED, "broken")
    assert cluster.assigned() == ["3"], "the other worker may have it yet"
    cluster.say("w2", 3, FAILED, "broken")
    assert cluster.assigned() == ["2", "3"]
    for worker in ("w1", "w2"):
        cluster.say(worker, 2, FAILED, "broken, too")
    assert cluster.assigned() == ["1", "2", "3"]
    for worker in ("w1", "w2"):
        cluster.say(worker, 1, READY)
    assert cluster.states() == {"1": READY, "2": FAILED, "3": FAILED}
    cluster.deploy(3, spares=(2, 1))
    for worker in ("w1", "w2"):
        cluster.say(worker, 3, READY)
    assert cluster.states() == {"1": UNLOADED, "2": UNLOADED, "3": READY}


def test_what_is_unloaded_stays_so_whatever_stood_in() -> None:
    cluster = replaced()
    cluster.unload()
    cluster.say("w1", 2, FAILED, "broken")
    assert cluster.assigned() == []
    assert cluster.states() == {"1": UNLOADED, "2": UNLOADED}


# --- workers that hold some blocks, and those that come and go


def test_a_block_that_is_not_everywhere_looks_at_the_workers_that_should_hold_it() -> None:
    cluster = Cluster("w1", "w2", "w3")
    cluster.write(1, BlockRole.CHOSEN, 1, replicas=1)
    cluster.apply()
    (block,) = cluster.registry.blocks()
    assert cluster.registry.assigned_to(block) == set(), "nobody was placed yet"
    assert not cluster.registry.has_answered("m")
    cluster.registry.place({"blk-1": ["w2"]})
    assert cluster.registry.assigned_to(block) == {"w2"}
    cluster.say("w2", 1, READY)
    assert cluster.is_settled("m")


def test_whoever_serves_a_block_keeps_it_until_its_new_holder_has_it() -> None:
    cluster = Cluster("w1", "w2")
    cluster.write(1, BlockRole.CHOSEN, 1, replicas=1)
    cluster.apply()
    cluster.registry.place({"blk-1": ["w1"]})
    cluster.say("w1", 1, READY)
    (block,) = cluster.registry.blocks()
    cluster.registry.place({"blk-1": ["w2"]})
    assert cluster.registry.assigned_to(block) == {"w1", "w2"}
    cluster.say("w2", 1, FAILED, "no")
    assert cluster.registry.assigned_to(block) == {"w1", "w2"}
    cluster.say("w2", 1, READY)
    assert cluster.registry.assigned_to(block) == {"w2"}


def test_a_worker_that_should_hold_nothing_gives_up_what_others_have() -> None:
    cluster = Cluster("w1")
    cluster.deploy(1)
    cluster.serve(1)
    (block,) = cluster.registry.blocks()
    cluster.registry.close(["w1"])
    assert cluster.registry.assigned_to(block) == {"w1"}, "nobody else has it"
    cluster.say("w2")
    assert cluster.registry.assigned_to(block) == {"w1", "w2"}
    cluster.say("w2", 1, READY)
    assert cluster.registry.assigned_to(block) == {"w2"}


def test_a_worker_that_was_not_heard_for_a_moment_has_not_ended() -> None:
    cluster = replaced()
    for _ in range(3):
        cluster.say("w2", 2, LOADING)
        cluster.registry.worker_detached("w2")
        assert cluster.assigned() == ["1", "2"]
    cluster.say("w2", 2, READY)
    cluster.say("w1", 2, READY)
    assert cluster.states() == {"1": UNLOADED, "2": READY}


def test_reports_are_deltas() -> None:
    cluster = Cluster("w")
    cluster.deploy(1, 2)
    ready = WorkerState(READY, "", 1, is_serving=True)
    registry = cluster.registry
    assert registry.worker_reported("w", [("blk-1", ready)], is_snapshot=False)
    assert registry.worker_reported("w", [("blk-2", ready)], is_snapshot=False)
    assert cluster.states() == {"1": READY, "2": READY}
    assert not registry.worker_reported("w", [], is_snapshot=False)
    assert registry.worker_reported("w", [], ["blk-1"], is_snapshot=False)
    assert cluster.states() == {"1": LOADING, "2": READY}
    assert registry.worker_reported("w", [("blk-1", ready)])
    assert cluster.states() == {"1": READY, "2": LOADING}, "a snapshot is everything"


def test_what_is_deleted_goes_when_nobody_holds_it() -> None:
    cluster = Cluster("w")
    cluster.deploy(1, 2)
    cluster.serve(1, 2)
    del cluster.records[1]
    cluster.apply()
    assert cluster.assigned() == ["2"]
    assert cluster.states() == {"1": UNLOADED, "2": READY}
    cluster.say("w", 1)
    assert cluster.states() == {"2": READY}


def test_what_was_written_without_a_reload_reloads_nothing() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.write(1, BlockRole.CHOSEN, 1, weight=2.0)
    cluster.apply()
    assert cluster.is_settled("m")
    assert cluster.states() == {"1": READY}


# --- a manager that takes over


def taken_over(before: Cluster) -> Cluster:
    """A new manager, which knows the records and nothing else."""
    after = Cluster()
    after.registry, after.revision, after.records = Registry(is_adopting=True), before.revision, before.records
    after.apply()
    after.said = before.said
    return after


def attach(cluster: Cluster, worker: str, *new: int) -> None:
    """What it holds it holds; these were assigned as new."""
    told = {
        block_id: found._replace(is_new=block_id in [f"blk-{version}" for version in new])
        for block_id, found in cluster.said[worker].items()
    }
    cluster.registry.worker_reported(worker, told.items())


def test_what_is_settled_is_as_it_was() -> None:
    before = Cluster("w1", "w2")
    before.deploy(1, spares=())
    before.serve(1)
    after = taken_over(before)
    assert after.states() == {"1": LOADING}
    attach(after, "w1")
    assert after.states() == {"1": READY}
    assert [(block.revision, block.is_new) for block in after.registry.assigned()] == [(1, False)]
    attach(after, "w2")
    assert after.is_settled("m")


def test_a_replacement_goes_on_where_it_was() -> None:
    before = replaced()
    before.say("w1", 2, READY)
    before.say("w2", 2, LOADING)
    after = taken_over(before)
    attach(after, "w1", 2)
    assert after.states() == {"1": READY, "2": LOADING}, "the other worker does not have it yet"
    assert [(block.version, block.is_new) for block in after.registry.assigned()] == [("1", False), ("2", True)]
    after.registry.end_adoption()
    attach(after, "w2", 2)


def test_a_replacement_ends_when_every_worker_has_come() -> None:
    before = replaced()
    before.say("w1", 2, READY)
    after = taken_over(before)
    attach(after, "w1", 2)
    attach(after, "w2", 2)
    after.say("w2", 2, READY)
    assert after.states() == {"1": READY, "2": LOADING}
    after.registry.end_adoption()
    assert after.states() == {"1": UNLOADED, "2": READY}


def test_what_stands_in_for_a_broken_version_stands_in_again() -> None:
    before = Cluster("w1")
    before.deploy(3, spares=(2, 1))
    before.say("w1", 3, FAILED, "broken")
    before.say("w1", 2, FAILED, "broken, too")
    before.say("w1", 1, READY)
    after = taken_over(before)
    assert after.assigned() == ["3"]
    attach(after, "w1")
    assert after.assigned() == ["1", "2", "3"]
    after.registry.end_adoption()
    assert after.states() == {"1": READY, "2": FAILED, "3": FAILED}


def test_what_was_unloaded_stays_so() -> None:
    before = Cluster("w1")
    before.deploy(1)
    before.serve(1)
    before.unload()
    after = taken_over(before)
    attach(after, "w1")
    assert after.assigned() == []
    assert after.states() == {"1": UNLOADED}
    assert not after.is_settled("m"), "the worker has not heard of it yet"
