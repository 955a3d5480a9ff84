"""A worker's models in memory: scripts of events, and long random lives."""

from collections import Counter
from random import Random
from typing import Literal

import pytest

from penstock.core.blocks import BlockState
from penstock.core.settings import Residence
from penstock.worker.residency import residency_actions
from penstock.worker.residency.residency import Residency
from penstock.worker.residency.residency_actions import Action, BlockAssignment, DeviceRoom, LoadEstimate, LoadReason

START, RELOAD, DEMAND = LoadReason.START, LoadReason.RELOAD, LoadReason.DEMAND


def estimate_of(
    files_bytes: int = 0,
    is_lazy: bool = False,
    idle_unload_s: float = 0.0,
    max_waiting_s: float = 60.0,
    keep_s: float = 0.0,
) -> LoadEstimate:
    load: Literal["lazy", "eager"] = "lazy" if is_lazy else "eager"
    residence = Residence(load=load, idle_unload_s=idle_unload_s, max_waiting_s=max_waiting_s)
    return LoadEstimate(residence, keep_s, files_bytes)


EAGER = estimate_of(files_bytes=10)
LAZY = estimate_of(is_lazy=True, files_bytes=10)


def block(name: str = "a", revision: int = 1, *replaces: str) -> BlockAssignment:
    replaced = tuple(f"blk-{each}" for each in replaces)
    return BlockAssignment(f"blk-{name}", name, "1", f"/models/{name}", revision, replaced, is_new=bool(replaces))


def deploy(residency: Residency, estimate: LoadEstimate, *names: str, now: float = 0.0) -> list[Action]:
    """Assign these blocks in addition to the held ones, and survey them."""
    fresh = [block(name) for name in names]
    held = [each.block for each in residency.held_blocks.values()]
    assert residency.assign([*held, *fresh], now)[-1] == residency_actions.SurveyBlocks(tuple(fresh))
    return [action for each in fresh for action in residency.on_surveyed(each, estimate, now)]


def reload(residency: Residency, estimate: LoadEstimate, name: str, revision: int, now: float = 0.0) -> list[Action]:
    newer = block(name, revision)
    held = [newer if each.block.block_id == newer.block_id else each.block for each in residency.held_blocks.values()]
    assert residency.assign(held, now) == [residency_actions.SurveyBlocks((newer,))]
    return residency.on_surveyed(newer, estimate, now)


def in_memory(budget_bytes: int, *names: str, estimate: LoadEstimate = EAGER) -> Residency:
    """Load these blocks one second after the other."""
    residency = Residency(budget_bytes)
    deploy(residency, estimate, *names)
    for second, name in enumerate(names):
        is_wanted, _ = residency.on_loaded(block(name), 10, float(second))
        assert is_wanted
    return residency


def state(residency: Residency, name: str = "a") -> BlockState:
    return residency.held_blocks[f"blk-{name}"].state


# --- deploying


def test_eager_blocks_are_loaded_one_after_the_other() -> None:
    residency = Residency()
    assert deploy(residency, EAGER, "a", "b") == [residency_actions.LoadBlock(block("a"), START)]
    assert residency.on_loaded(block("a"), 10, 1.0) == (True, [residency_actions.LoadBlock(block("b"), START)])
    assert (state(residency, "a"), state(residency, "b")) == (BlockState.READY, BlockState.LOADING)
    assert residency.on_loaded(block("b"), 10, 2.0) == (True, [])


def test_a_repeated_assignment_does_nothing() -> None:
    residency = in_memory(0, "a")
    assert residency.assign([block("a")], 5.0) == []


def test_a_withdrawn_block_is_unloaded() -> None:
    residency = in_memory(0, "a", "b")
    deploy(residency, LAZY, "c")
    assert residency.assign([block("b")], 5.0) == [residency_actions.ForgetBlock("blk-c")]
    assert residency.tick(5.2) == [], "a gateway may not know of the removal yet"
    assert residency.tick(5.25) == [residency_actions.UnloadBlock("blk-a", "unloaded")]
    assert set(residency.held_blocks) == {"blk-b"}


def test_a_withdrawn_block_finishes_its_jobs_first() -> None:
    residency = in_memory(0, "a")
    residency.assign([], 5.0)
    residency.record_use(["blk-a"], [], 6.0)
    assert residency.tick(6.0) == []
    residency.record_use([], ["blk-a"], 9.0)
    assert residency.tick(9.1) == []
    assert residency.tick(9.25) == [residency_actions.UnloadBlock("blk-a", "unloaded")]


def test_a_withdrawn_block_is_unloaded_after_the_drain_time_even_with_jobs() -> None:
    residency = in_memory(0, "a")
    residency.assign([], 5.0)
    residency.record_use(["blk-a"], [], 24.9)
    assert residency.tick(24.9) == []
    residency.record_use(["blk-a"], [], 25.0)
    assert residency.tick(25.0) == [residency_actions.UnloadBlock("blk-a", "unloaded")]


def test_a_block_assigned_again_before_its_unload_is_loaded_beside_the_old_one() -> None:
    residency = in_memory(0, "a")
    residency.assign([], 5.0)
    assert residency.assign([block(revision=2)], 5.1) == [residency_actions.SurveyBlocks((block(revision=2),))]
    assert residency.tick(50.0) == []
    assert residency.on_surveyed(block(revision=2), EAGER, 50.0) == [
        residency_actions.LoadBlock(block(revision=2), RELOAD)
    ]


# --- a block that replaces another


def test_a_replacement_is_loaded_beside_its_predecessor_whatever_the_budget() -> None:
    residency = in_memory(10, "a")
    newer = block("b", 2, "a")
    assert residency.assign([block("a"), newer], 5.0) == [residency_actions.SurveyBlocks((newer,))]
    assert residency.on_surveyed(newer, EAGER, 5.0) == [residency_actions.LoadBlock(newer, START)]
    assert residency.on_loaded(newer, 10, 6.0) == (True, []), "neither block is unloaded for the other"
    assert residency.tick(7.0) == []
    residency.assign([block("b", 2)], 8.0)
    assert residency.tick(9.0) == [residency_actions.UnloadBlock("blk-a", "unloaded")]


def test_a_replacement_is_loaded_even_if_it_is_lazy() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    newer = block("b", 2, "a")
    residency.assign([block("a"), newer], 5.0)
    assert residency.on_surveyed(newer, LAZY, 5.0) == [residency_actions.LoadBlock(newer, START)]


def test_a_replacement_without_room_fails() -> None:
    residency = in_memory(20, "a", "c")
    newer = block("b", 2, "a")
    residency.assign([block("a"), block("c"), newer], 5.0)
    residency.record_use(["blk-a", "blk-c"], [], 5.0)
    assert residency.on_surveyed(newer, estimate_of(files_bytes=15, max_waiting_s=3.0), 5.0) == []
    residency.record_use(["blk-a", "blk-c"], [], 8.0)
    (failed,) = residency.tick(8.0)
    assert isinstance(failed, residency_actions.FailBlock)
    assert "worker.memory_budget_bytes" in failed.reason
    assert state(residency, "a") is BlockState.READY


def test_a_replacement_can_evict_a_third_block() -> None:
    residency = in_memory(20, "a", "c")
    newer = block("b", 2, "a")
    residency.assign([block("a"), block("c"), newer], 5.0)
    residency.record_use([], [], 5.0)
    assert residency.on_surveyed(newer, estimate_of(files_bytes=15), 5.0) == [
        residency_actions.UnloadBlock("blk-c", "evicted"),
        residency_actions.MakeBlockDormant("blk-c"),
    ]
    assert residency.on_released(10, 6.0) == [residency_actions.LoadBlock(newer, START)]


def test_a_block_withdrawn_while_loading_is_not_used() -> None:
    residency = Residency(15)
    deploy(residency, EAGER, "a")
    assert residency.assign([], 1.0) == [residency_actions.ForgetBlock("blk-a")]
    assert residency.on_loaded(block(), 10, 2.0) == (False, [])
    deploy(residency, EAGER, "b", now=3.0)
    assert residency.on_released(10, 4.0) == [residency_actions.LoadBlock(block("b"), START)], (
        "the next block has waited for this memory"
    )


def test_an_unreadable_folder_fails_the_block() -> None:
    residency = Residency()
    residency.assign([block("a")], 0.0)
    assert residency.on_load_failed(block("a"), "no model.yaml", 1.0) == [
        residency_actions.FailBlock(block("a"), "no model.yaml")
    ]
    assert residency.held_blocks["blk-a"].reason == "no model.yaml"


def test_a_failed_block_is_retried_only_on_request() -> None:
    residency = Residency()
    deploy(residency, EAGER, "a")
    residency.on_load_failed(block(), "broken", 1.0)
    assert residency.assign([block()], 2.0) == []
    assert residency.demand("blk-a", 2.0) == []
    assert reload(residency, EAGER, "a", 2) == [residency_actions.LoadBlock(block(revision=2), START)]


# --- reloading


def test_a_higher_revision_is_loaded_beside_the_old_one_and_then_replaces_it() -> None:
    residency = in_memory(10, "a")
    assert reload(residency, EAGER, "a", 2) == [residency_actions.LoadBlock(block(revision=2), RELOAD)], (
        "a reload needs no room in the budget"
    )
    assert residency.on_loaded(block(revision=2), 10, 5.0) == (True, [])
    assert residency.occupied_bytes == 20, "the old revision drains"
    residency.on_released(10, 6.0)
    assert residency.occupied_bytes == 10


def test_a_failed_reload_keeps_the_old_revision_serving() -> None:
    restless = estimate_of(files_bytes=10, idle_unload_s=1.0)
    residency = in_memory(20, "a", estimate=restless)
    reload(residency, restless, "a", 2)
    assert residency.on_load_failed(block(revision=2), "bad file", 5.0) == [
        residency_actions.FailBlock(block(revision=2), "bad file")
    ]
    assert (state(residency), residency.held_blocks["blk-a"].reason) == (BlockState.FAILED, "bad file")
    assert residency.tick(100.0) == [], "an unloaded revision could not be loaded again"
    deploy(residency, estimate_of(is_lazy=True, files_bytes=20), "b", now=100.0)
    assert residency.demand("blk-b", 100.0) == []
    assert residency.assign([], 101.0) == [residency_actions.ForgetBlock("blk-b")]
    assert residency.tick(102.0) == [residency_actions.UnloadBlock("blk-a", "unloaded")]


def test_a_reload_larger_than_the_budget_keeps_the_old_revision() -> None:
    residency = in_memory(15, "a")
    reload(residency, EAGER, "a", 2)
    is_wanted, actions = residency.on_loaded(block(revision=2), 16, 5.0)
    assert not is_wanted
    assert [type(action) for action in actions] == [residency_actions.FailBlock]
    assert residency.held_blocks["blk-a"].is_resident


def test_a_revision_assigned_while_loading_is_loaded_next() -> None:
    residency = Residency()
    deploy(residency, EAGER, "a")
    assert reload(residency, EAGER, "a", 3) == []
    assert residency.on_loaded(block(), 10, 1.0) == (False, [residency_actions.LoadBlock(block(revision=3), START)])
    assert residency.on_loaded(block(revision=3), 10, 2.0) == (True, [])


def test_jobs_waiting_for_an_outdated_revision_wait_for_the_newer_one() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    residency.assign([block(revision=2)], 1.0)
    assert residency.on_load_failed(block(), "gone", 2.0) == [], "the folder is read again first"
    assert residency.on_surveyed(block(revision=2), LAZY, 3.0) == [
        residency_actions.LoadBlock(block(revision=2), DEMAND)
    ]


def test_a_block_withdrawn_during_a_reload_and_assigned_again_is_loaded_as_new() -> None:
    residency = in_memory(0, "a")
    reload(residency, EAGER, "a", 2)
    assert residency.assign([], 5.0) == []
    assert residency.tick(5.5) == [residency_actions.UnloadBlock("blk-a", "unloaded")]
    assert residency.assign([block(revision=3)], 6.0) == [residency_actions.SurveyBlocks((block(revision=3),))]
    assert residency.on_surveyed(block(revision=3), LAZY, 7.0) == [residency_actions.MakeBlockDormant("blk-a")]
    assert residency.on_loaded(block(revision=2), 10, 8.0) == (False, []), "the block is lazy now and has no jobs"
    assert residency.demand("blk-a", 9.0) == [residency_actions.LoadBlock(block(revision=3), DEMAND)]


def test_a_newer_revision_that_cannot_be_loaded_fails_the_block() -> None:
    residency = Residency(15)
    deploy(residency, EAGER, "a")
    (failed,) = reload(residency, estimate_of(files_bytes=20), "a", 2)
    assert isinstance(failed, residency_actions.FailBlock)
    assert residency.on_loaded(block(), 10, 1.0) == (False, [])
    assert residency.tick(100.0) == []


# --- dormant


def test_a_lazy_block_stays_dormant_until_the_first_job_and_is_loaded_once() -> None:
    residency = Residency()
    assert deploy(residency, LAZY, "a") == [residency_actions.MakeBlockDormant("blk-a")]
    assert state(residency) is BlockState.DORMANT
    assert residency.demand("blk-a", 1.0) == [residency_actions.LoadBlock(block(), DEMAND)]
    assert residency.demand("blk-a", 1.1) == []
    assert state(residency) is BlockState.DORMANT, "the block takes jobs all the time"
    assert residency.on_loaded(block(), 10, 2.0) == (True, [])
    assert residency.demand("blk-a", 3.0) == []


def test_requested_blocks_are_loaded_before_eager_ones() -> None:
    residency = Residency()
    deploy(residency, LAZY, "lazy")
    deploy(residency, EAGER, "a", "b")
    assert residency.demand("blk-lazy", 1.0) == []
    assert residency.on_loaded(block("a"), 10, 2.0) == (True, [residency_actions.LoadBlock(block("lazy"), DEMAND)])


def test_a_lazy_block_that_cannot_be_loaded_fails_its_waiting_jobs() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    assert residency.on_load_failed(block(), "broken", 1.0) == [residency_actions.FailBlock(block(), "broken")]
    assert reload(residency, LAZY, "a", 2) == [residency_actions.MakeBlockDormant("blk-a")], (
        "a repaired block becomes dormant again"
    )


def test_a_newer_revision_of_a_dormant_lazy_block_stays_dormant() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    assert reload(residency, LAZY, "a", 2) == [residency_actions.MakeBlockDormant("blk-a")]
    assert residency.demand("blk-a", 1.0) == [residency_actions.LoadBlock(block(revision=2), DEMAND)]


def test_an_idle_block_is_unloaded_and_loaded_again_on_demand() -> None:
    residency = in_memory(0, "a", estimate=estimate_of(idle_unload_s=10.0))
    assert residency.tick(9.9) == []
    residency.record_use(["blk-a"], [], 9.9)
    assert residency.tick(30.0) == [], "it has jobs"
    residency.record_use([], ["blk-a"], 31.0)
    assert residency.tick(40.9) == []
    assert residency.tick(41.0) == [
        residency_actions.UnloadBlock("blk-a", "idle"),
        residency_actions.MakeBlockDormant("blk-a"),
    ]
    assert state(residency) is BlockState.DORMANT
    assert residency.demand("blk-a", 42.0) == [residency_actions.LoadBlock(block(), DEMAND)]


# --- the budget


def test_eager_blocks_are_loaded_while_they_fit() -> None:
    residency = Residency(25)
    assert deploy(residency, EAGER, "a", "b", "c") == [residency_actions.LoadBlock(block("a"), START)]
    assert residency.on_loaded(block("a"), 10, 1.0) == (True, [residency_actions.LoadBlock(block("b"), START)])
    assert residency.on_loaded(block("b"), 12, 2.0) == (True, [residency_actions.MakeBlockDormant("blk-c")])
    assert state(residency, "c") is BlockState.DORMANT


def test_the_least_recently_used_block_is_evicted_before_the_load_starts() -> None:
    residency = in_memory(25, "a", "b")
    deploy(residency, LAZY, "c")
    residency.record_use([], ["blk-a"], 5.0)
    assert residency.demand("blk-c", 6.0) == [
        residency_actions.UnloadBlock("blk-b", "evicted"),
        residency_actions.MakeBlockDormant("blk-b"),
    ]
    assert residency.demand("blk-b", 6.5) == [], "block b is behind the other one"
    assert residency.on_released(10, 7.0) == [residency_actions.LoadBlock(block("c"), DEMAND)]
    is_wanted, actions = residency.on_loaded(block("c"), 10, 8.0)
    assert is_wanted
    assert actions == [
        residency_actions.UnloadBlock("blk-a", "evicted"),
        residency_actions.MakeBlockDormant("blk-a"),
    ], "block a makes room for b, because c has jobs"


def test_a_block_with_jobs_is_not_evicted_and_the_load_waits() -> None:
    residency = in_memory(10, "a")
    deploy(residency, LAZY, "b")
    residency.record_use(["blk-a"], [], 5.0)
    assert residency.demand("blk-b", 5.0) == []
    assert "too little" in residency.waiting_reason("blk-b")
    assert residency.tick(6.0) == []
    residency.record_use([], ["blk-a"], 7.0)
    assert residency.tick(7.0) == [
        residency_actions.UnloadBlock("blk-a", "evicted"),
        residency_actions.MakeBlockDormant("blk-a"),
    ]
    assert residency.on_released(10, 8.0) == [residency_actions.LoadBlock(block("b"), DEMAND)]


def test_nothing_is_evicted_if_that_would_not_make_enough_room() -> None:
    residency = in_memory(20, "a", "b")
    deploy(residency, estimate_of(is_lazy=True, files_bytes=20), "large")
    residency.record_use(["blk-b"], [], 5.0)
    assert residency.demand("blk-large", 5.0) == []


def test_a_load_without_room_is_given_up_after_its_time_limit() -> None:
    residency = in_memory(10, "a")
    deploy(residency, estimate_of(is_lazy=True, files_bytes=10, max_waiting_s=3.0), "b")
    residency.record_use(["blk-a"], [], 5.0)
    residency.demand("blk-b", 5.0)
    residency.demand("blk-b", 6.0)
    residency.tick(8.9)
    residency.tick(9.0)
    residency.record_use([], [], 10.0)
    assert residency.tick(10.0) == [], "no job waits for the load any more"
    assert state(residency, "b") is BlockState.DORMANT


def test_a_newer_revision_is_surveyed_before_its_load_is_given_up() -> None:
    residency = in_memory(10, "a")
    patient = estimate_of(is_lazy=True, files_bytes=10, max_waiting_s=3.0)
    deploy(residency, patient, "b")
    residency.record_use(["blk-a"], [], 5.0)
    residency.demand("blk-b", 5.0)
    residency.assign([block("a"), block("b", 2)], 6.0)
    assert residency.tick(9.0) == []
    assert state(residency, "b") is BlockState.LOADING, "the newer revision may have other settings"
    residency.on_surveyed(block("b", 2), patient, 10.0)
    assert residency.tick(10.1) == [residency_actions.MakeBlockDormant("blk-b")]


def test_a_smaller_load_overtakes_one_that_must_wait() -> None:
    residency = in_memory(25, "a", "b")
    deploy(residency, estimate_of(is_lazy=True, files_bytes=12), "large")
    deploy(residency, estimate_of(is_lazy=True, files_bytes=5), "small")
    residency.record_use(["blk-a", "blk-b"], [], 5.0)
    assert residency.demand("blk-large", 5.0) == []
    assert residency.demand("blk-small", 5.1) == [residency_actions.LoadBlock(block("small"), DEMAND)]


def test_room_made_for_one_load_is_not_used_by_another() -> None:
    residency = in_memory(25, "a", "b")
    deploy(residency, estimate_of(is_lazy=True, files_bytes=12), "large")
    deploy(residency, estimate_of(is_lazy=True, files_bytes=5), "small")
    assert residency.demand("blk-large", 5.0) == [
        residency_actions.UnloadBlock("blk-a", "evicted"),
        residency_actions.MakeBlockDormant("blk-a"),
    ]
    assert residency.demand("blk-small", 5.1) == []
    assert residency.on_released(10, 6.0) == [residency_actions.LoadBlock(block("large"), DEMAND)]


def test_a_block_larger_than_the_budget_fails_with_the_reason() -> None:
    residency = Residency(9)
    (failed,) = deploy(residency, LAZY, "a")
    assert isinstance(failed, residency_actions.FailBlock)
    assert "10 bytes" in failed.reason
    assert "worker.memory_budget_bytes (9)" in failed.reason
    assert residency.demand("blk-a", 1.0) == []


def test_a_block_that_loads_larger_than_the_budget_fails() -> None:
    residency = Residency(20)
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    is_wanted, (failed,) = residency.on_loaded(block(), 21, 1.0)
    assert not is_wanted
    assert isinstance(failed, residency_actions.FailBlock)
    assert state(residency) is BlockState.FAILED
    residency.on_released(21, 2.0)
    assert residency.occupied_bytes == 0
    assert reload(residency, LAZY, "a", 2) == [residency_actions.MakeBlockDormant("blk-a")], (
        "the newer revision may have other settings"
    )


def test_a_block_that_loads_larger_than_its_files_evicts_others() -> None:
    residency = in_memory(30, "a", "b")
    deploy(residency, LAZY, "c")
    residency.record_use(["blk-a"], [], 5.0)
    residency.demand("blk-c", 5.0)
    assert residency.on_loaded(block("c"), 15, 6.0) == (
        True,
        [residency_actions.UnloadBlock("blk-b", "evicted"), residency_actions.MakeBlockDormant("blk-b")],
    )


def test_a_measured_size_is_remembered_until_the_files_change() -> None:
    residency = Residency(40)
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    residency.on_loaded(block(), 30, 1.0)
    deploy(residency, LAZY, "b", now=2.0)
    residency.record_use([], [], 2.0)
    residency.tick(2.0)
    assert residency.demand("blk-b", 3.0) == [residency_actions.LoadBlock(block("b"), DEMAND)]
    residency.on_loaded(block("b"), 20, 4.0)  # too much for both
    assert state(residency, "a") is BlockState.DORMANT
    residency.on_released(30, 5.0)
    residency.record_use([], [], 5.0)
    assert residency.demand("blk-a", 5.0) == [
        residency_actions.UnloadBlock("blk-b", "evicted"),
        residency_actions.MakeBlockDormant("blk-b"),
    ], "30 are needed, not 10"
    reload(residency, estimate_of(is_lazy=True, files_bytes=11), "a", 2, now=6.0)
    assert residency.held_blocks["blk-a"].size_bytes == 11


def test_a_block_with_sessions_is_not_evicted_while_they_may_be_active() -> None:
    residency = in_memory(10, "a", estimate=estimate_of(files_bytes=10, keep_s=60.0))
    deploy(residency, LAZY, "b")
    residency.record_use([], [], 30.0)
    assert residency.demand("blk-b", 30.0) == []
    assert residency.tick(60.0) == [
        residency_actions.UnloadBlock("blk-a", "evicted"),
        residency_actions.MakeBlockDormant("blk-a"),
    ]


def test_an_operator_who_reloads_an_eager_block_can_evict_another() -> None:
    residency = in_memory(10, "a")
    deploy(residency, EAGER, "b")
    assert state(residency, "b") is BlockState.DORMANT
    residency.record_use([], [], 5.0)
    assert reload(residency, EAGER, "b", 2, now=5.0) == [
        residency_actions.UnloadBlock("blk-a", "evicted"),
        residency_actions.MakeBlockDormant("blk-a"),
    ]
    assert state(residency, "b") is BlockState.LOADING
    assert residency.on_released(10, 6.0) == [residency_actions.LoadBlock(block("b", 2), START)]


def test_an_eager_block_reloaded_without_room_ends_dormant() -> None:
    residency = in_memory(10, "a")
    deploy(residency, EAGER, "b")
    residency.record_use(["blk-a"], [], 5.0)
    assert reload(residency, EAGER, "b", 2, now=5.0) == []
    assert residency.tick(65.0) == [residency_actions.MakeBlockDormant("blk-b")]


# --- random lives


class World:
    """A worker that performs residency's actions, with random jobs and faults."""

    def __init__(self, seed: int, budget: int) -> None:
        self.random = Random(seed)
        self.budget = budget
        self.now = 0.0
        self.residency = Residency(budget)
        self.names = [f"m{number}" for number in range(6)]
        self.revisions = dict.fromkeys(self.names, 0)
        self.wanted: dict[str, BlockAssignment] = {}
        self.outlooks: dict[BlockAssignment, LoadEstimate] = {}
        self.surveys: list[BlockAssignment] = []
        self.loading: residency_actions.LoadBlock | None = None
        self.room = 0  # kept for it
        self.resident: dict[str, int] = {}
        self.leaving: list[int] = []
        self.running: Counter[str] = Counter()
        self.used: dict[str, float] = {}
        self.waiting: dict[str, list[float]] = {}  # dormant blocks: since when
        self.asked = 0
        self.ended: Counter[str] = Counter()

    def step(self) -> None:
        events = {
            self.request: 10,
            self.finish: 12,
            self.load_ends: 5,
            self.survey_ends: 5,
            self.release: 4,
            self.tick: 5,
            self.assign: 1,
        }
        self.record_use()
        (event,) = self.random.choices(list(events), list(events.values()))
        event()
        self.check()

    def record_use(self) -> None:
        self.residency.record_use([each for each, jobs in self.running.items() if jobs], [], self.now)

    # --- events

    def assign(self) -> None:
        for name in self.random.sample(self.names, 2):
            if name in self.wanted and self.random.random() < 0.3:
                del self.wanted[name]
                continue
            self.revisions[name] += 1
            others = [other for other in self.wanted if other != name]
            replaced = [self.random.choice(others)] if others and self.random.random() < 0.3 else []
            self.wanted[name] = assigned = block(name, self.revisions[name], *replaced)
            self.outlooks[assigned] = estimate_of(
                is_lazy=self.random.random() < 0.5,
                idle_unload_s=self.random.choice([0.0, 2.0]),
                max_waiting_s=5.0,
                keep_s=self.random.choice([0.0, 0.0, 3.0]),
                files_bytes=self.random.randint(1, 45),
            )
        self.perform(self.residency.assign(list(self.wanted.values()), self.now))

    def request(self) -> None:
        block_id = f"blk-{self.random.choice(self.names)}"
        if block_id in self.resident:
            self.asked += 1
            self.running[block_id] += 1
            self.used[block_id] = self.now
        elif block_id in self.waiting:
            self.asked += 1
            self.waiting[block_id].append(self.now)
            self.perform(self.residency.demand(block_id, self.now))

    def finish(self) -> None:
        for block_id in [each for each, jobs in self.running.items() if jobs][:1]:
            self.running[block_id] -= 1
            self.used[block_id] = self.now
            self.ended["answered"] += 1
            self.residency.record_use([], [block_id], self.now)
            self.record_use()

    def survey_ends(self, may_fail: bool = True) -> None:
        if self.surveys:
            surveyed = self.surveys.pop(self.random.randrange(len(self.surveys)))
            if may_fail and self.random.random() < 0.05:
                self.perform(self.residency.on_load_failed(surveyed, "unreadable", self.now))
            else:
                self.perform(self.residency.on_surveyed(surveyed, self.outlooks[surveyed], self.now))

    def load_ends(self, may_fail: bool = True) -> None:
        if self.loading is None:
            return
        loaded, self.loading, self.room = self.loading.block, None, 0
        if may_fail and self.random.random() < 0.1:
            self.perform(self.residency.on_load_failed(loaded, "broken", self.now))
            return
        size = self.outlooks[loaded].files_bytes + self.random.choice([0, 0, 0, 5, 60])
        is_wanted, actions = self.residency.on_loaded(loaded, size, self.now)
        if is_wanted:
            self.take_up(loaded.block_id, size)
        else:
            self.leaving.append(size)
        self.perform(actions)

    def take_up(self, block_id: str, size: int) -> None:
        if block_id in self.resident:
            self.leaving.append(self.resident[block_id])
            self.ended["answered"] += self.running.pop(block_id, 0)  # by the old one, which drains
        self.resident[block_id] = size
        self.used[block_id] = self.now
        self.running[block_id] += len(self.waiting.pop(block_id, []))

    def release(self) -> None:
        if self.leaving:
            size = self.leaving.pop(self.random.randrange(len(self.leaving)))
            self.perform(self.residency.on_released(size, self.now))

    def tick(self) -> None:
        self.now += self.random.choice([0.05, 0.5, 1.0])
        self.record_use()
        for block_id, since in self.waiting.items():
            in_time = [arrived for arrived in since if arrived + 5.0 > self.now]
            self.ended["late"] += len(since) - len(in_time)
            self.waiting[block_id] = in_time
        self.perform(self.residency.tick(self.now))
        if self.residency.occupied_bytes - sum(self.leaving) > self.budget:
            for block_id in self.resident:
                held = self.residency.held_blocks[block_id]
                is_pinned = self.running[block_id] or held.state is not BlockState.READY or held.leaves <= self.now
                assert is_pinned or self.is_kept(block_id) or self.is_replaced(), (
                    "no block over the budget could be unloaded"
                )

    # --- actions

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case residency_actions.SurveyBlocks(blocks):
                    self.surveys += blocks
                case residency_actions.LoadBlock():
                    self.start_load(action)
                case residency_actions.MakeBlockDormant(block_id):
                    assert block_id not in self.resident
                    self.waiting.setdefault(block_id, [])
                case residency_actions.UnloadBlock(block_id, event):
                    self.unload(block_id, event)
                case residency_actions.ForgetBlock(block_id):
                    self.ended["handed back"] += len(self.waiting.pop(block_id, []))
                case residency_actions.FailBlock(failed):
                    self.ended["failed"] += len(self.waiting.pop(failed.block_id, []))

    def start_load(self, action: residency_actions.LoadBlock) -> None:
        assert self.loading is None, "one block is loaded at a time"
        held = self.residency.held_blocks[action.block.block_id]
        assert held.block == action.block
        assert (action.reason is RELOAD) == (held.block.block_id in self.resident)
        if action.reason is not RELOAD:
            staying = [each for each in action.block.replaces if each in self.resident]
            replaced = sum(
                self.resident[each] for each in staying if self.residency.held_blocks[each].leaves > self.now
            )
            self.room = max(0, held.size_bytes - replaced)
            assert action.block.replaces or self.residency.occupied_bytes <= self.budget, (
                "only a reload may exceed the budget"
            )
        self.loading = action

    def unload(self, block_id: str, event: str) -> None:
        self.leaving.append(self.resident.pop(block_id))
        if event == "unloaded":
            self.ended["answered"] += self.running.pop(block_id, 0)
            return
        assert not self.running[block_id], "a block with jobs stays in memory"
        assert not self.is_kept(block_id)
        assert self.loading is None or self.loading.block.block_id != block_id, (
            "a block that is being reloaded stays in memory"
        )

    def is_kept(self, block_id: str) -> bool:
        estimate = self.residency.held_blocks[block_id].estimate
        return estimate is not None and self.now - self.used[block_id] < estimate.keep_s

    def is_replaced(self) -> bool:
        """Return whether a block is in memory only until another one replaces it."""
        return any(held.block.replaces and held.is_resident for held in self.residency.held_blocks.values())

    def check(self) -> None:
        here = sum(self.running.values()) + sum(map(len, self.waiting.values()))
        assert self.asked == here + sum(self.ended.values()), "no job is lost and none ends twice"
        assert self.residency.occupied_bytes == sum(self.resident.values()) + sum(self.leaving) + self.room
        for block_id, held in self.residency.held_blocks.items():
            assert held.is_resident == (block_id in self.resident)
            if held.state is BlockState.DORMANT:
                assert block_id in self.waiting, "a dormant block takes jobs"

    def come_to_rest(self) -> None:
        """Stop all requests and faults."""
        for _ in range(200):
            self.record_use()
            self.survey_ends(may_fail=False)
            self.load_ends(may_fail=False)
            self.release()
            for _ in range(20):
                self.finish()
            self.tick()
            self.check()


@pytest.mark.parametrize("seed", range(40))
def test_invariants_hold_during_random_events(seed: int) -> None:
    world = World(seed, budget=Random(seed).choice([0, 50, 100]) or 10**9)
    for _ in range(3000):
        world.step()
    assert world.asked > 200, "the random events contain enough jobs"
    world.come_to_rest()
    assert not any(world.waiting.values()), "every waiting job was served or failed"
    assert not any(world.running.values())
    assert not world.surveys
    assert world.loading is None
    assert not world.leaving


# --- memory of a GPU


def on_gpu(device_bytes: int = 50, told_bytes: int = 0, total_bytes: int = 100) -> LoadEstimate:
    residence = Residence(max_waiting_s=60.0, device_memory_bytes=told_bytes)
    return LoadEstimate(residence, 0.0, 10, "cuda:0", told_bytes or device_bytes, total_bytes)


def free(size_bytes: int, claimed_bytes: int = 0) -> dict[str, DeviceRoom]:
    return {"cuda:0": DeviceRoom(size_bytes, claimed_bytes)}


def loaded_there(residency: Residency, name: str, device_bytes: int, now: float = 0.0) -> None:
    residency.record_use((), (), now)
    is_wanted, _ = residency.on_loaded(block(name), 10, now, ("cuda:0", device_bytes))
    assert is_wanted


def test_a_block_waits_until_the_free_memory_is_known() -> None:
    residency = Residency()
    assert deploy(residency, on_gpu(), "a") == []
    assert residency.devices_wanted() == {"cuda:0"}
    residency.record_use((), (), 1.0, free(50))
    assert residency.tick(1.0) == [residency_actions.LoadBlock(block("a"), START, "cuda:0", 50)]
    loaded_there(residency, "a", 30)
    assert residency.devices_wanted() == set()


def test_a_block_larger_than_its_gpu_fails_with_both_sizes() -> None:
    residency = Residency()
    (failed,) = deploy(residency, on_gpu(2 * 2**30, total_bytes=2**30), "a")
    assert isinstance(failed, residency_actions.FailBlock)
    assert failed.is_device_full
    assert "it needs 2.0 GiB on cuda:0, which has 1.0 GiB in total" in failed.reason


def test_a_block_without_room_at_the_start_is_dormant_and_waits_on_demand() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50 * 2**20, total_bytes=2**30), "a")
    residency.record_use((), (), 1.0, free(2**20))
    assert residency.tick(1.0) == [residency_actions.MakeBlockDormant("blk-a")]
    assert state(residency) is BlockState.DORMANT
    assert "it needs 50 MiB on cuda:0, where 1 MiB are free" in residency.held_blocks["blk-a"].reason
    assert residency.demand("blk-a", 2.0) == []
    residency.record_use((), (), 3.0, free(2**20))
    assert residency.tick(3.0) == []
    assert residency.lacks_device("blk-a")
    assert residency.is_short_of_device()
    assert "where 1 MiB are free" in residency.waiting_reason("blk-a")
    residency.record_use((), (), 4.0, free(60 * 2**20))
    assert residency.tick(4.0) == [residency_actions.LoadBlock(block("a"), DEMAND, "cuda:0", 50 * 2**20)]


def test_only_idle_blocks_of_the_same_gpu_are_evicted() -> None:
    residency = Residency()
    deploy(residency, EAGER, "cpu")
    assert residency.on_loaded(block("cpu"), 10, 0.0)[0]
    for second, name in enumerate(("old", "new"), start=1):
        deploy(residency, on_gpu(), name)
        residency.record_use((), (), second, free(100))
        residency.tick(second)
        loaded_there(residency, name, 30, second)
    deploy(residency, on_gpu(60), "a")
    residency.record_use((), (), 5.0, free(40))
    assert residency.tick(5.0) == [residency_actions.MakeBlockDormant("blk-a")]
    residency.record_use((), (), 6.0, free(40))
    assert residency.demand("blk-a", 6.0) == [
        residency_actions.UnloadBlock("blk-old", "evicted"),
        residency_actions.MakeBlockDormant("blk-old"),
    ]
    residency.record_use((), (), 7.0, free(40))
    assert residency.tick(7.0) == []  # the evicted block is still being unloaded: no other must go
    residency.record_use((), (), 8.0, free(70))
    assert residency.on_released(10, 8.0) == [residency_actions.LoadBlock(block("a"), DEMAND, "cuda:0", 60)]


def test_a_load_that_ran_out_of_memory_needs_more_than_was_free() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.record_use((), (), 1.0, free(80))
    residency.tick(1.0)
    residency.record_use((), (), 2.0, free(80))
    (failed,) = residency.on_load_failed(block("a"), "out of memory", 2.0, is_device_full=True)
    assert failed == residency_actions.FailBlock(block("a"), "out of memory", is_device_full=True)
    assert residency.on_surveyed(block("a"), on_gpu(50), 17.0) == []
    residency.record_use((), (), 18.0, free(80))
    assert residency.tick(18.0) == []
    residency.record_use((), (), 19.0, free(81))
    assert residency.tick(19.0) == [residency_actions.LoadBlock(block("a"), START, "cuda:0", 81)]


def test_the_memory_of_a_load_is_remembered_unless_the_settings_give_it() -> None:
    residency = Residency()
    for name, estimate, expected in (("a", on_gpu(50), 30), ("b", on_gpu(told_bytes=45), 45)):
        deploy(residency, estimate, name)
        residency.record_use((), (), 1.0, free(100))
        residency.tick(1.0)
        loaded_there(residency, name, 30)
        assert residency.held_blocks[f"blk-{name}"].device_bytes == expected


def test_a_reload_without_room_beside_the_old_revision_fails_and_the_old_one_serves_on() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.record_use((), (), 1.0, free(100))
    residency.tick(1.0)
    loaded_there(residency, "a", 60)
    assert reload(residency, on_gpu(50), "a", 2, 2.0) == []
    residency.record_use((), (), 3.0, free(40))
    (failed,) = residency.tick(3.0)
    assert isinstance(failed, residency_actions.FailBlock)
    assert failed.is_device_full
    assert residency.held_blocks["blk-a"].is_resident


def test_a_load_whose_memory_another_worker_claims_starts_later() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.record_use((), (), 1.0, free(50))
    (load,) = residency.tick(1.0)
    residency.on_postponed(block("a"))
    assert residency.tick(1.1) == []
    residency.record_use((), (), 1.2, free(50))
    assert residency.tick(1.2) == [load]


def test_while_others_load_on_the_gpu_nothing_is_given_up_or_evicted() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.record_use((), (), 1.0, free(20, claimed_bytes=40))
    assert residency.tick(1.0) == []
    residency.record_use((), (), 2.0, free(60))
    assert residency.tick(2.0) == [residency_actions.LoadBlock(block("a"), START, "cuda:0", 50)]
    assert residency.devices_wanted() == {"cuda:0"}  # memory that is free when a load fails counts too
