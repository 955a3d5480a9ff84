"""The block table: desired blocks, workers' reports, settled blocks, and the replacement of versions."""

from typing import Any

import pytest

from penstock.core.blocks import BlockRecord, BlockRole, BlockState
from penstock.manager.block_table import BlockTable
from penstock.manager.deployed_block import WorkerState
from penstock.manager.desired_state import DesiredBlock

READY, FAILED, LOADING = BlockState.READY, BlockState.FAILED, BlockState.LOADING
UNLOADED, DORMANT = BlockState.UNLOADED, BlockState.DORMANT


class Cluster:
    """A block table with one model, and workers that report their progress with it."""

    def __init__(self, *workers: str) -> None:
        self.registry = BlockTable()
        self.revision = 0
        self.records: dict[int, DesiredBlock] = {}  # by version
        self.said: dict[str, dict[str, WorkerState]] = {worker: {} for worker in workers}
        for worker in workers:
            self.say(worker)

    def is_settled(self, model: str) -> bool:
        """Return True if every worker reported the chosen version's newest revision, and removed ones are unloaded."""
        return self.registry.has_load_ended(model) and self.registry.has_unloaded_unwanted(model)

    def deploy(self, *versions: int, spares: tuple[int, ...] = ()) -> None:
        """Write blocks like the manager: a serving block keeps its revision, whatever its role is now."""
        self.revision += 1
        for version in {*self.records, *versions, *spares}:
            role = BlockRole.CHOSEN if version in versions else BlockRole.SPARE
            role = role if version in (*versions, *spares) else BlockRole.WITHDRAWN
            block = self.registry.get(f"blk-{version}")
            is_kept = version not in versions and block is not None and block.is_wanted and block.is_in_service
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
        """Report the worker's progress with the version's newest revision; without a state, that it is unloaded."""
        said = self.said.setdefault(worker, {})
        if state is not None:
            (block,) = [block for block in self.registry.list_blocks() if block.version == str(version)]
            before = said.get(block.block_id)
            is_serving = state is READY or (before is not None and before.is_serving)
            said[block.block_id] = WorkerState(state, reason, block.revision, is_serving)
        else:
            said.pop(f"blk-{version}", None)
        self.registry.worker_reported(worker, said.items())

    def serve(self, *versions: int) -> None:
        """Report these versions as loaded on every worker, and no others."""
        for worker in self.said:
            for block in self.registry.list_blocks():
                self.say(worker, int(block.version), READY if int(block.version) in versions else None)

    def leave(self, worker: str) -> None:
        del self.said[worker]
        self.registry.worker_left(worker)

    def states(self) -> dict[str, BlockState]:
        return {block.version: block.compute_state()[0] for block in self.registry.list_shown_blocks()}

    def assigned(self) -> list[str]:
        return [block.version for block in self.registry.list_assigned_blocks()]


def test_a_block_goes_from_loading_to_ready() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    (block,) = cluster.registry.list_blocks()
    assert block.compute_state() == (LOADING, "loading")
    report = [("blk-1", WorkerState(READY, "", 1, is_serving=True))]
    assert cluster.registry.worker_reported("w", report)
    assert block.compute_state() == (READY, "")
    assert not cluster.registry.worker_reported("w", report)
    assert cluster.is_settled("m")


def test_one_ready_worker_makes_a_block_ready_and_only_failed_ones_make_it_failed() -> None:
    cluster = Cluster("w1", "w2")
    cluster.deploy(1)
    (block,) = cluster.registry.list_blocks()
    cluster.say("w1", 1, FAILED, "no")
    assert block.compute_state() == (FAILED, "no")
    cluster.say("w2", 1, READY)
    assert block.compute_state() == (READY, "failed on 1 of 2 workers: no")
    assert cluster.registry.describe_failure("m") == "version 1 failed to load: no", "no earlier version serves"
    cluster.leave("w2")
    assert block.compute_state() == (FAILED, "no")
    assert cluster.registry.describe_failure("m") == "version 1 failed to load: no"


def test_a_new_revision_is_settled_once_reported_and_the_old_one_serves_meanwhile() -> None:
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


def test_a_revision_that_does_not_load_is_reported_and_the_block_stays_ready() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(1)
    cluster.say("w", 1, FAILED, "no model")
    assert cluster.is_settled("m")
    assert cluster.registry.list_blocks()[0].compute_state() == (READY, "still serving, but reloading failed: no model")
    assert cluster.registry.describe_failure("m") == ("version 1 failed to load: no model; still serving: version 1")


def test_a_withdrawn_block_is_settled_when_no_worker_holds_it() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.unload()
    assert cluster.assigned() == []
    assert not cluster.is_settled("m")
    cluster.say("w", 1)
    assert cluster.is_settled("m")
    assert cluster.states() == {"1": UNLOADED}


def test_a_dormant_block_is_settled_and_counts_until_a_worker_has_loaded_it() -> None:
    cluster = Cluster("w1")
    cluster.deploy(1)
    (block,) = cluster.registry.list_blocks()
    cluster.say("w1", 1, DORMANT)
    assert block.compute_state() == (DORMANT, "")
    assert cluster.is_settled("m")
    assert cluster.registry.describe_failure("m") == ""
    cluster.say("w2", 1, FAILED, "no")
    assert block.compute_state() == (DORMANT, ""), "the other worker can still load the block"
    cluster.say("w1", 1, READY)
    assert block.compute_state()[0] is READY


# --- from one version to another


def replaced() -> Cluster:
    """Version 1 serves on both workers, and version 2 was chosen."""
    cluster = Cluster("w1", "w2")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(2)
    return cluster


def test_the_old_version_is_removed_when_every_worker_has_the_new_one() -> None:
    cluster = replaced()
    assert cluster.assigned() == ["1", "2"]
    assert cluster.states() == {"1": READY, "2": LOADING}
    cluster.say("w1", 2, READY)
    assert cluster.states() == {"1": READY, "2": LOADING}, "the other worker does not have it yet"
    cluster.say("w2", 2, READY)
    assert cluster.states() == {"1": UNLOADED, "2": READY}
    assert cluster.assigned() == ["2"]
    assert cluster.registry.has_load_ended("m")
    assert not cluster.is_settled("m"), "the old version is still there"
    cluster.serve(2)
    assert cluster.is_settled("m")


@pytest.mark.parametrize("is_on_one", [True, False])
def test_a_version_that_does_not_load_everywhere_leaves_the_old_one_serving(is_on_one: bool) -> None:
    cluster = replaced()
    cluster.say("w1", 2, READY if is_on_one else FAILED, "" if is_on_one else "broken")
    cluster.say("w2", 2, FAILED, "broken")
    assert cluster.registry.has_load_ended("m")
    assert cluster.states() == {"1": READY, "2": FAILED}
    assert cluster.assigned() == ["1", "2"]
    assert cluster.registry.describe_failure("m") == ("version 2 failed to load: broken; still serving: version 1")


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
    assert cluster.assigned() == ["1", "3"], "no worker needs the broken version"
    cluster.serve(1, 3)
    assert cluster.states() == {"1": UNLOADED, "2": UNLOADED, "3": READY}


def test_the_repaired_version_replaces_the_old_one() -> None:
    cluster = replaced()
    for worker in ("w1", "w2"):
        cluster.say(worker, 2, FAILED, "broken")
    cluster.deploy(2)
    assert cluster.states() == {"1": READY, "2": LOADING}
    cluster.serve(1, 2)
    assert cluster.states() == {"1": UNLOADED, "2": READY}


def test_returning_to_an_old_version_is_a_normal_change() -> None:
    cluster = replaced()
    cluster.serve(1, 2)
    cluster.serve(2)
    cluster.deploy(1)
    assert cluster.states() == {"1": LOADING, "2": READY}
    cluster.serve(1, 2)
    assert cluster.states() == {"1": READY, "2": UNLOADED}


def test_a_worker_that_dies_during_the_change_does_not_delay_the_others() -> None:
    cluster = replaced()
    cluster.say("w1", 2, READY)
    cluster.leave("w2")
    assert cluster.states() == {"1": UNLOADED, "2": READY}
    cluster.say("w2")
    assert cluster.assigned() == ["2"]


def test_without_workers_nothing_is_replaced() -> None:
    cluster = replaced()
    cluster.say("w1", 2, READY)
    cluster.said["w2"] = {}
    cluster.say("w2")
    cluster.leave("w1")
    cluster.leave("w2")
    assert cluster.states() == {"1": LOADING, "2": LOADING}
    assert cluster.assigned() == ["1", "2"]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_version_whose_load_kills_workers_is_given_up(is_told: bool) -> None:
    cluster = replaced()
    for worker in ("w1", "w2"):
        if is_told:
            cluster.say(worker, 2, LOADING)
        cluster.leave(worker)
    assert cluster.assigned() == ["1"]
    cluster.say("w1", 1, READY)
    assert cluster.states() == {"1": READY, "2": FAILED}
    assert cluster.registry.has_load_ended("m")
    assert "worker processes died" in cluster.registry.describe_failure("m")
    cluster.deploy(2)
    assert cluster.assigned() == ["1", "2"], "loading the model again tries the version again"


def test_other_versions_stay_settled_while_one_is_added_and_removed() -> None:
    cluster = Cluster("w")
    cluster.deploy(1, 2)
    cluster.serve(1, 2)
    cluster.deploy(2, 3)
    cluster.say("w", 2, LOADING)
    assert cluster.states() == {"1": READY, "2": READY, "3": LOADING}
    cluster.say("w", 2, READY)
    cluster.say("w", 3, READY)
    assert cluster.states() == {"1": UNLOADED, "2": READY, "3": READY}


def test_an_additional_version_serves_when_every_worker_has_it() -> None:
    cluster = Cluster("w1", "w2")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(1, 2)
    (new,) = [block for block in cluster.registry.list_assigned_blocks() if block.is_new]
    assert (new.version, new.replaces) == ("2", ())
    cluster.say("w1", 2, READY)
    assert cluster.states() == {"1": READY, "2": LOADING}
    cluster.say("w2", 2, READY)
    assert cluster.states() == {"1": READY, "2": READY}


def test_versions_added_together_at_the_start_serve_as_they_are_loaded() -> None:
    cluster = Cluster("w1", "w2")
    cluster.deploy(1, 2)
    cluster.say("w1", 1, READY)
    cluster.say("w1", 2, READY)
    assert cluster.states() == {"1": READY, "2": READY}


def test_a_version_that_never_served_is_no_spare() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.deploy(2)
    assert cluster.assigned() == ["2"]


def test_if_the_latest_version_does_not_load_at_the_start_the_one_before_serves() -> None:
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


def test_an_unloaded_model_stays_unloaded_even_if_a_spare_served() -> None:
    cluster = replaced()
    cluster.unload()
    cluster.say("w1", 2, FAILED, "broken")
    assert cluster.assigned() == []
    assert cluster.states() == {"1": UNLOADED, "2": UNLOADED}


# --- blocks on some workers only, and workers that join and leave


def test_a_block_with_replicas_depends_on_its_assigned_workers() -> None:
    cluster = Cluster("w1", "w2", "w3")
    cluster.write(1, BlockRole.CHOSEN, 1, replicas=1)
    cluster.apply()
    (block,) = cluster.registry.list_blocks()
    assert cluster.registry.find_assigned_workers(block) == set(), "the block is not placed yet"
    assert not cluster.registry.has_load_ended("m")
    cluster.registry.set_placement({"blk-1": ["w2"]})
    assert cluster.registry.find_assigned_workers(block) == {"w2"}
    cluster.say("w2", 1, READY)
    assert cluster.is_settled("m")


def test_a_serving_worker_keeps_its_block_until_the_new_holder_has_it() -> None:
    cluster = Cluster("w1", "w2")
    cluster.write(1, BlockRole.CHOSEN, 1, replicas=1)
    cluster.apply()
    cluster.registry.set_placement({"blk-1": ["w1"]})
    cluster.say("w1", 1, READY)
    (block,) = cluster.registry.list_blocks()
    cluster.registry.set_placement({"blk-1": ["w2"]})
    assert cluster.registry.find_assigned_workers(block) == {"w1", "w2"}
    cluster.say("w2", 1, FAILED, "no")
    assert cluster.registry.find_assigned_workers(block) == {"w1", "w2"}
    cluster.say("w2", 1, READY)
    assert cluster.registry.find_assigned_workers(block) == {"w2"}


def test_a_worker_without_assignments_unloads_blocks_that_other_workers_hold() -> None:
    cluster = Cluster("w1")
    cluster.deploy(1)
    cluster.serve(1)
    (block,) = cluster.registry.list_blocks()
    cluster.registry.set_excluded_workers(["w1"])
    assert cluster.registry.find_assigned_workers(block) == {"w1"}, "no other worker has the block"
    cluster.say("w2")
    assert cluster.registry.find_assigned_workers(block) == {"w1", "w2"}
    cluster.say("w2", 1, READY)
    assert cluster.registry.find_assigned_workers(block) == {"w2"}


def test_a_short_silence_of_a_worker_is_not_its_end() -> None:
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
    assert cluster.states() == {"1": READY, "2": LOADING}, "a snapshot replaces everything"


def test_a_deleted_block_is_removed_when_no_worker_holds_it() -> None:
    cluster = Cluster("w")
    cluster.deploy(1, 2)
    cluster.serve(1, 2)
    del cluster.records[1]
    cluster.apply()
    assert cluster.assigned() == ["2"]
    assert cluster.states() == {"1": UNLOADED, "2": READY}
    cluster.say("w", 1)
    assert cluster.states() == {"2": READY}


def test_a_write_without_a_reload_reloads_nothing() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.write(1, BlockRole.CHOSEN, 1, weight=2.0)
    cluster.apply()
    assert cluster.is_settled("m")
    assert cluster.states() == {"1": READY}


# --- a new leader


def taken_over(before: Cluster) -> Cluster:
    """Return a new manager that knows only the records."""
    after = Cluster()
    after.registry, after.revision, after.records = BlockTable(is_adopting=True), before.revision, before.records
    after.apply()
    after.said = before.said
    return after


def attach(cluster: Cluster, worker: str, *new: int) -> None:
    """Report the worker's blocks; the blocks in `new` count as newly assigned."""
    told = {
        block_id: found._replace(is_new=block_id in [f"blk-{version}" for version in new])
        for block_id, found in cluster.said[worker].items()
    }
    cluster.registry.worker_reported(worker, told.items())


def test_a_new_leader_finds_settled_blocks_settled() -> None:
    before = Cluster("w1", "w2")
    before.deploy(1, spares=())
    before.serve(1)
    after = taken_over(before)
    assert after.states() == {"1": LOADING}
    attach(after, "w1")
    assert after.states() == {"1": READY}
    assert [(block.revision, block.is_new) for block in after.registry.list_assigned_blocks()] == [(1, False)]
    attach(after, "w2")
    assert after.is_settled("m")


def test_a_new_leader_continues_a_replacement() -> None:
    before = replaced()
    before.say("w1", 2, READY)
    before.say("w2", 2, LOADING)
    after = taken_over(before)
    attach(after, "w1", 2)
    assert after.states() == {"1": READY, "2": LOADING}, "the other worker does not have it yet"
    assert [(block.version, block.is_new) for block in after.registry.list_assigned_blocks()] == [
        ("1", False),
        ("2", True),
    ]
    after.registry.end_adoption()
    attach(after, "w2", 2)


def test_a_replacement_ends_when_every_worker_has_attached() -> None:
    before = replaced()
    before.say("w1", 2, READY)
    after = taken_over(before)
    attach(after, "w1", 2)
    attach(after, "w2", 2)
    after.say("w2", 2, READY)
    assert after.states() == {"1": READY, "2": LOADING}
    after.registry.end_adoption()
    assert after.states() == {"1": UNLOADED, "2": READY}


def test_a_spare_for_a_broken_version_serves_again_under_a_new_leader() -> None:
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


def test_an_unloaded_model_stays_unloaded_under_a_new_leader() -> None:
    before = Cluster("w1")
    before.deploy(1)
    before.serve(1)
    before.unload()
    after = taken_over(before)
    attach(after, "w1")
    assert after.assigned() == []
    assert after.states() == {"1": UNLOADED}
    assert not after.is_settled("m"), "the worker has not unloaded the model yet"
