"""The registry: wanted blocks, workers' reports, what is settled, and how one version gives way to another."""

import pytest

from penstock.core.blocks import BlockState
from penstock.manager.registry import Chosen, Registry, WorkerState

READY, FAILED, LOADING = BlockState.READY, BlockState.FAILED, BlockState.LOADING
UNLOADED, DORMANT = BlockState.UNLOADED, BlockState.DORMANT


def chosen(*versions: int) -> list[Chosen]:
    return [Chosen(str(version), f"blk-{version}") for version in versions]


class Cluster:
    """A registry with one model, and workers that say how far they are with it."""

    def __init__(self, *workers: str) -> None:
        self.registry = Registry()
        self.said: dict[str, dict[str, WorkerState]] = {worker: {} for worker in workers}
        for worker in workers:
            self.say(worker)

    def deploy(self, *versions: int, spares: tuple[int, ...] = ()) -> None:
        self.registry.deploy("m", "/m", chosen(*versions), chosen(*spares))

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
        return {block.version: block.state()[0] for block in self.registry.blocks()}

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
    assert cluster.registry.is_settled("m")


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
    assert not cluster.registry.is_settled("m")
    cluster.say("w", 1, LOADING)
    assert not cluster.registry.is_settled("m")
    assert cluster.states() == {"1": READY}
    cluster.say("w", 1, READY)
    assert cluster.registry.is_settled("m")


def test_a_revision_that_does_not_load_leaves_the_block_ready_and_is_told() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.deploy(1)
    cluster.say("w", 1, FAILED, "no model")
    assert cluster.registry.is_settled("m")
    assert cluster.registry.blocks()[0].state() == (READY, "serves, but was not loaded anew: no model")
    assert cluster.registry.failure("m") == (
        "version 1 failed to load: no model; what served before serves on (version 1)"
    )


def test_withdrawn_is_settled_when_nobody_holds_it() -> None:
    cluster = Cluster("w")
    cluster.deploy(1)
    cluster.serve(1)
    cluster.registry.withdraw("m")
    assert cluster.assigned() == []
    assert not cluster.registry.is_settled("m")
    cluster.say("w", 1)
    assert cluster.registry.is_settled("m")
    assert cluster.states() == {"1": UNLOADED}


def test_a_dormant_block_is_settled_and_counts_until_some_worker_has_it() -> None:
    cluster = Cluster("w1")
    cluster.deploy(1)
    (block,) = cluster.registry.blocks()
    cluster.say("w1", 1, DORMANT)
    assert block.state() == (DORMANT, "")
    assert cluster.registry.is_settled("m")
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
    assert not cluster.registry.is_settled("m"), "the old one is still there"
    cluster.serve(2)
    assert cluster.registry.is_settled("m")


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
    assert cluster.assigned() == ["2", "1", "3"]
    for worker in ("w1", "w2"):
        cluster.say(worker, 1, READY)
    assert cluster.states() == {"1": READY, "2": FAILED, "3": FAILED}
    cluster.deploy(3, spares=(2, 1))
    for worker in ("w1", "w2"):
        cluster.say(worker, 3, READY)
    assert cluster.states() == {"1": UNLOADED, "2": UNLOADED, "3": READY}


def test_what_is_unloaded_stays_so_whatever_stood_in() -> None:
    cluster = replaced()
    cluster.registry.withdraw("m")
    cluster.say("w1", 2, FAILED, "broken")
    assert cluster.assigned() == []
    assert cluster.states() == {"1": UNLOADED, "2": UNLOADED}
