"""What a worker has in memory: scripts of events, and long random lives."""

from collections import Counter
from random import Random
from typing import Literal

import pytest

from penstock.core.blocks import BlockState
from penstock.core.settings import Residence
from penstock.worker.residency import steps
from penstock.worker.residency.residency import Residency
from penstock.worker.residency.steps import Action, Assigned, DeviceRoom, Outlook, Why

START, RELOAD, DEMAND = Why.START, Why.RELOAD, Why.DEMAND


def outlook_of(
    files_bytes: int = 0,
    is_lazy: bool = False,
    idle_unload_s: float = 0.0,
    max_waiting_s: float = 60.0,
    keep_s: float = 0.0,
) -> Outlook:
    load: Literal["lazy", "eager"] = "lazy" if is_lazy else "eager"
    residence = Residence(load=load, idle_unload_s=idle_unload_s, max_waiting_s=max_waiting_s)
    return Outlook(residence, keep_s, files_bytes)


EAGER = outlook_of(files_bytes=10)
LAZY = outlook_of(is_lazy=True, files_bytes=10)


def block(name: str = "a", revision: int = 1, *replaces: str) -> Assigned:
    replaced = tuple(f"blk-{each}" for each in replaces)
    return Assigned(f"blk-{name}", name, "1", f"/models/{name}", revision, replaced, is_new=bool(replaces))


def deploy(residency: Residency, outlook: Outlook, *names: str, now: float = 0.0) -> list[Action]:
    """Assigns these beside what is held, and surveys them."""
    fresh = [block(name) for name in names]
    held = [each.block for each in residency.held.values()]
    assert residency.assign([*held, *fresh], now)[-1] == steps.SurveyBlocks(tuple(fresh))
    return [action for each in fresh for action in residency.surveyed(each, outlook, now)]


def reload(residency: Residency, outlook: Outlook, name: str, revision: int, now: float = 0.0) -> list[Action]:
    newer = block(name, revision)
    held = [newer if each.block.block_id == newer.block_id else each.block for each in residency.held.values()]
    assert residency.assign(held, now) == [steps.SurveyBlocks((newer,))]
    return residency.surveyed(newer, outlook, now)


def in_memory(budget_bytes: int, *names: str, outlook: Outlook = EAGER) -> Residency:
    """These are loaded, each at its own second, the first longest ago."""
    residency = Residency(budget_bytes)
    deploy(residency, outlook, *names)
    for second, name in enumerate(names):
        is_wanted, _ = residency.loaded(block(name), 10, float(second))
        assert is_wanted
    return residency


def state(residency: Residency, name: str = "a") -> BlockState:
    return residency.held[f"blk-{name}"].state


# --- deploying


def test_eager_blocks_are_loaded_one_after_the_other() -> None:
    residency = Residency()
    assert deploy(residency, EAGER, "a", "b") == [steps.LoadBlock(block("a"), START)]
    assert residency.loaded(block("a"), 10, 1.0) == (True, [steps.LoadBlock(block("b"), START)])
    assert (state(residency, "a"), state(residency, "b")) == (BlockState.READY, BlockState.LOADING)
    assert residency.loaded(block("b"), 10, 2.0) == (True, [])


def test_the_same_assignment_twice_does_nothing() -> None:
    residency = in_memory(0, "a")
    assert residency.assign([block("a")], 5.0) == []


def test_what_is_not_wanted_any_more_is_let_go_of() -> None:
    residency = in_memory(0, "a", "b")
    deploy(residency, LAZY, "c")
    assert residency.assign([block("b")], 5.0) == [steps.ForgetBlock("blk-c")]
    assert residency.tick(5.2) == [], "some gateway may not have heard of it yet"
    assert residency.tick(5.25) == [steps.UnloadBlock("blk-a", "unloaded")]
    assert set(residency.held) == {"blk-b"}


def test_what_is_not_wanted_any_more_ends_its_jobs_first() -> None:
    residency = in_memory(0, "a")
    residency.assign([], 5.0)
    residency.look(["blk-a"], [], 6.0)
    assert residency.tick(6.0) == []
    residency.look([], ["blk-a"], 9.0)
    assert residency.tick(9.1) == []
    assert residency.tick(9.25) == [steps.UnloadBlock("blk-a", "unloaded")]


def test_what_is_not_wanted_any_more_goes_after_its_time_idle_or_not() -> None:
    residency = in_memory(0, "a")
    residency.assign([], 5.0)
    residency.look(["blk-a"], [], 24.9)
    assert residency.tick(24.9) == []
    residency.look(["blk-a"], [], 25.0)
    assert residency.tick(25.0) == [steps.UnloadBlock("blk-a", "unloaded")]


def test_what_is_wanted_again_before_it_went_is_loaded_anew_beside_itself() -> None:
    residency = in_memory(0, "a")
    residency.assign([], 5.0)
    assert residency.assign([block(revision=2)], 5.1) == [steps.SurveyBlocks((block(revision=2),))]
    assert residency.tick(50.0) == []
    assert residency.surveyed(block(revision=2), EAGER, 50.0) == [steps.LoadBlock(block(revision=2), RELOAD)]


# --- one that replaces another


def test_what_replaces_another_is_loaded_beside_it_whatever_the_budget() -> None:
    residency = in_memory(10, "a")
    newer = block("b", 2, "a")
    assert residency.assign([block("a"), newer], 5.0) == [steps.SurveyBlocks((newer,))]
    assert residency.surveyed(newer, EAGER, 5.0) == [steps.LoadBlock(newer, START)]
    assert residency.loaded(newer, 10, 6.0) == (True, []), "neither has to go for the other"
    assert residency.tick(7.0) == []
    residency.assign([block("b", 2)], 8.0)
    assert residency.tick(9.0) == [steps.UnloadBlock("blk-a", "unloaded")]


def test_what_replaces_another_is_loaded_although_it_is_lazy() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    newer = block("b", 2, "a")
    residency.assign([block("a"), newer], 5.0)
    assert residency.surveyed(newer, LAZY, 5.0) == [steps.LoadBlock(newer, START)]


def test_what_replaces_another_and_finds_no_room_fails() -> None:
    residency = in_memory(20, "a", "c")
    newer = block("b", 2, "a")
    residency.assign([block("a"), block("c"), newer], 5.0)
    residency.look(["blk-a", "blk-c"], [], 5.0)
    assert residency.surveyed(newer, outlook_of(files_bytes=15, max_waiting_s=3.0), 5.0) == []
    residency.look(["blk-a", "blk-c"], [], 8.0)
    (failed,) = residency.tick(8.0)
    assert isinstance(failed, steps.FailBlock)
    assert "worker.memory_budget_bytes" in failed.reason
    assert state(residency, "a") is BlockState.READY


def test_what_replaces_another_may_have_the_room_of_a_third() -> None:
    residency = in_memory(20, "a", "c")
    newer = block("b", 2, "a")
    residency.assign([block("a"), block("c"), newer], 5.0)
    residency.look([], [], 5.0)
    assert residency.surveyed(newer, outlook_of(files_bytes=15), 5.0) == [
        steps.UnloadBlock("blk-c", "evicted"),
        steps.RestBlock("blk-c"),
    ]
    assert residency.released(10, 6.0) == [steps.LoadBlock(newer, START)]


def test_what_was_withdrawn_while_it_loaded_is_not_taken_up() -> None:
    residency = Residency(15)
    deploy(residency, EAGER, "a")
    assert residency.assign([], 1.0) == [steps.ForgetBlock("blk-a")]
    assert residency.loaded(block(), 10, 2.0) == (False, [])
    deploy(residency, EAGER, "b", now=3.0)
    assert residency.released(10, 4.0) == [steps.LoadBlock(block("b"), START)], "its memory was waited for"


def test_a_folder_that_cannot_be_read_fails_the_block() -> None:
    residency = Residency()
    residency.assign([block("a")], 0.0)
    assert residency.failed(block("a"), "no model.yaml", 1.0) == [steps.FailBlock(block("a"), "no model.yaml")]
    assert residency.held["blk-a"].reason == "no model.yaml"


def test_a_failed_block_is_tried_again_only_when_asked() -> None:
    residency = Residency()
    deploy(residency, EAGER, "a")
    residency.failed(block(), "broken", 1.0)
    assert residency.assign([block()], 2.0) == []
    assert residency.demand("blk-a", 2.0) == []
    assert reload(residency, EAGER, "a", 2) == [steps.LoadBlock(block(revision=2), START)]


# --- reloading


def test_a_higher_revision_loads_beside_the_old_one_and_then_replaces_it() -> None:
    residency = in_memory(10, "a")
    assert reload(residency, EAGER, "a", 2) == [steps.LoadBlock(block(revision=2), RELOAD)], (
        "although the budget is full"
    )
    assert residency.loaded(block(revision=2), 10, 5.0) == (True, [])
    assert residency.occupied_bytes == 20, "the old one drains"
    residency.released(10, 6.0)
    assert residency.occupied_bytes == 10


def test_a_failed_reload_keeps_the_old_one_serving_and_in_memory() -> None:
    restless = outlook_of(files_bytes=10, idle_unload_s=1.0)
    residency = in_memory(20, "a", outlook=restless)
    reload(residency, restless, "a", 2)
    assert residency.failed(block(revision=2), "bad file", 5.0) == [steps.FailBlock(block(revision=2), "bad file")]
    assert (state(residency), residency.held["blk-a"].reason) == (BlockState.FAILED, "bad file")
    assert residency.tick(100.0) == [], "out of memory it could not come back"
    deploy(residency, outlook_of(is_lazy=True, files_bytes=20), "b", now=100.0)
    assert residency.demand("blk-b", 100.0) == []
    assert residency.assign([], 101.0) == [steps.ForgetBlock("blk-b")]
    assert residency.tick(102.0) == [steps.UnloadBlock("blk-a", "unloaded")]


def test_a_reload_that_turns_out_larger_than_the_budget_keeps_the_old_one() -> None:
    residency = in_memory(15, "a")
    reload(residency, EAGER, "a", 2)
    is_wanted, actions = residency.loaded(block(revision=2), 16, 5.0)
    assert not is_wanted
    assert [type(action) for action in actions] == [steps.FailBlock]
    assert residency.held["blk-a"].is_resident


def test_a_revision_that_came_while_loading_is_loaded_next() -> None:
    residency = Residency()
    deploy(residency, EAGER, "a")
    assert reload(residency, EAGER, "a", 3) == []
    assert residency.loaded(block(), 10, 1.0) == (False, [steps.LoadBlock(block(revision=3), START)])
    assert residency.loaded(block(revision=3), 10, 2.0) == (True, [])


def test_those_who_wait_for_an_outdated_revision_wait_for_the_newer() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    residency.assign([block(revision=2)], 1.0)
    assert residency.failed(block(), "gone", 2.0) == [], "its folder is looked at again first"
    assert residency.surveyed(block(revision=2), LAZY, 3.0) == [steps.LoadBlock(block(revision=2), DEMAND)]


def test_what_was_withdrawn_while_it_was_reloaded_and_wanted_again_is_loaded_as_new() -> None:
    residency = in_memory(0, "a")
    reload(residency, EAGER, "a", 2)
    assert residency.assign([], 5.0) == []
    assert residency.tick(5.5) == [steps.UnloadBlock("blk-a", "unloaded")]
    assert residency.assign([block(revision=3)], 6.0) == [steps.SurveyBlocks((block(revision=3),))]
    assert residency.surveyed(block(revision=3), LAZY, 7.0) == [steps.RestBlock("blk-a")]
    assert residency.loaded(block(revision=2), 10, 8.0) == (False, []), "it is lazy now, and nobody waits for it"
    assert residency.demand("blk-a", 9.0) == [steps.LoadBlock(block(revision=3), DEMAND)]


def test_a_newer_revision_that_cannot_be_loaded_ends_the_matter() -> None:
    residency = Residency(15)
    deploy(residency, EAGER, "a")
    (failed,) = reload(residency, outlook_of(files_bytes=20), "a", 2)
    assert isinstance(failed, steps.FailBlock)
    assert residency.loaded(block(), 10, 1.0) == (False, [])
    assert residency.tick(100.0) == []


# --- dormant


def test_a_lazy_block_rests_until_somebody_wants_it_and_is_loaded_once() -> None:
    residency = Residency()
    assert deploy(residency, LAZY, "a") == [steps.RestBlock("blk-a")]
    assert state(residency) is BlockState.DORMANT
    assert residency.demand("blk-a", 1.0) == [steps.LoadBlock(block(), DEMAND)]
    assert residency.demand("blk-a", 1.1) == []
    assert state(residency) is BlockState.DORMANT, "it takes requests all the while"
    assert residency.loaded(block(), 10, 2.0) == (True, [])
    assert residency.demand("blk-a", 3.0) == []


def test_what_is_wanted_goes_before_what_is_only_loaded_ahead() -> None:
    residency = Residency()
    deploy(residency, LAZY, "lazy")
    deploy(residency, EAGER, "a", "b")
    assert residency.demand("blk-lazy", 1.0) == []
    assert residency.loaded(block("a"), 10, 2.0) == (True, [steps.LoadBlock(block("lazy"), DEMAND)])


def test_a_lazy_block_that_cannot_be_loaded_fails_those_who_wait() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    assert residency.failed(block(), "broken", 1.0) == [steps.FailBlock(block(), "broken")]
    assert reload(residency, LAZY, "a", 2) == [steps.RestBlock("blk-a")], "mended, it rests again"


def test_a_newer_revision_of_a_dormant_lazy_block_rests_too() -> None:
    residency = Residency()
    deploy(residency, LAZY, "a")
    assert reload(residency, LAZY, "a", 2) == [steps.RestBlock("blk-a")]
    assert residency.demand("blk-a", 1.0) == [steps.LoadBlock(block(revision=2), DEMAND)]


def test_a_block_that_ran_nothing_for_long_is_unloaded_and_comes_back() -> None:
    residency = in_memory(0, "a", outlook=outlook_of(idle_unload_s=10.0))
    assert residency.tick(9.9) == []
    residency.look(["blk-a"], [], 9.9)
    assert residency.tick(30.0) == [], "it has jobs"
    residency.look([], ["blk-a"], 31.0)
    assert residency.tick(40.9) == []
    assert residency.tick(41.0) == [steps.UnloadBlock("blk-a", "idle"), steps.RestBlock("blk-a")]
    assert state(residency) is BlockState.DORMANT
    assert residency.demand("blk-a", 42.0) == [steps.LoadBlock(block(), DEMAND)]


# --- the budget


def test_eager_blocks_are_loaded_while_they_fit() -> None:
    residency = Residency(25)
    assert deploy(residency, EAGER, "a", "b", "c") == [steps.LoadBlock(block("a"), START)]
    assert residency.loaded(block("a"), 10, 1.0) == (True, [steps.LoadBlock(block("b"), START)])
    assert residency.loaded(block("b"), 12, 2.0) == (True, [steps.RestBlock("blk-c")])
    assert state(residency, "c") is BlockState.DORMANT


def test_the_least_recently_used_makes_room_once_it_is_really_gone() -> None:
    residency = in_memory(25, "a", "b")
    deploy(residency, LAZY, "c")
    residency.look([], ["blk-a"], 5.0)
    assert residency.demand("blk-c", 6.0) == [steps.UnloadBlock("blk-b", "evicted"), steps.RestBlock("blk-b")]
    assert residency.demand("blk-b", 6.5) == [], "behind the other"
    assert residency.released(10, 7.0) == [steps.LoadBlock(block("c"), DEMAND)]
    is_wanted, actions = residency.loaded(block("c"), 10, 8.0)
    assert is_wanted
    assert actions == [steps.UnloadBlock("blk-a", "evicted"), steps.RestBlock("blk-a")], "for b; c has jobs now"


def test_what_has_jobs_is_not_evicted_and_the_load_waits_for_it() -> None:
    residency = in_memory(10, "a")
    deploy(residency, LAZY, "b")
    residency.look(["blk-a"], [], 5.0)
    assert residency.demand("blk-b", 5.0) == []
    assert "no room" in residency.why_waiting("blk-b")
    assert residency.tick(6.0) == []
    residency.look([], ["blk-a"], 7.0)
    assert residency.tick(7.0) == [steps.UnloadBlock("blk-a", "evicted"), steps.RestBlock("blk-a")]
    assert residency.released(10, 8.0) == [steps.LoadBlock(block("b"), DEMAND)]


def test_nothing_is_evicted_where_that_would_not_make_room() -> None:
    residency = in_memory(20, "a", "b")
    deploy(residency, outlook_of(is_lazy=True, files_bytes=20), "large")
    residency.look(["blk-b"], [], 5.0)
    assert residency.demand("blk-large", 5.0) == []


def test_a_load_that_gets_no_room_is_given_up_after_its_time() -> None:
    residency = in_memory(10, "a")
    deploy(residency, outlook_of(is_lazy=True, files_bytes=10, max_waiting_s=3.0), "b")
    residency.look(["blk-a"], [], 5.0)
    residency.demand("blk-b", 5.0)
    residency.demand("blk-b", 6.0)
    residency.tick(8.9)
    residency.tick(9.0)
    residency.look([], [], 10.0)
    assert residency.tick(10.0) == [], "nobody waits for it any more"
    assert state(residency, "b") is BlockState.DORMANT


def test_a_newer_revision_is_looked_at_before_its_load_is_given_up() -> None:
    residency = in_memory(10, "a")
    patient = outlook_of(is_lazy=True, files_bytes=10, max_waiting_s=3.0)
    deploy(residency, patient, "b")
    residency.look(["blk-a"], [], 5.0)
    residency.demand("blk-b", 5.0)
    residency.assign([block("a"), block("b", 2)], 6.0)
    assert residency.tick(9.0) == []
    assert state(residency, "b") is BlockState.LOADING, "whoever loads it anew is not told yet"
    residency.surveyed(block("b", 2), patient, 10.0)
    assert residency.tick(10.1) == [steps.RestBlock("blk-b")]


def test_a_smaller_load_passes_one_that_must_wait() -> None:
    residency = in_memory(25, "a", "b")
    deploy(residency, outlook_of(is_lazy=True, files_bytes=12), "large")
    deploy(residency, outlook_of(is_lazy=True, files_bytes=5), "small")
    residency.look(["blk-a", "blk-b"], [], 5.0)
    assert residency.demand("blk-large", 5.0) == []
    assert residency.demand("blk-small", 5.1) == [steps.LoadBlock(block("small"), DEMAND)]


def test_nobody_takes_the_room_that_is_made_for_another() -> None:
    residency = in_memory(25, "a", "b")
    deploy(residency, outlook_of(is_lazy=True, files_bytes=12), "large")
    deploy(residency, outlook_of(is_lazy=True, files_bytes=5), "small")
    assert residency.demand("blk-large", 5.0) == [steps.UnloadBlock("blk-a", "evicted"), steps.RestBlock("blk-a")]
    assert residency.demand("blk-small", 5.1) == []
    assert residency.released(10, 6.0) == [steps.LoadBlock(block("large"), DEMAND)]


def test_a_block_larger_than_the_budget_fails_and_says_so() -> None:
    residency = Residency(9)
    (failed,) = deploy(residency, LAZY, "a")
    assert isinstance(failed, steps.FailBlock)
    assert "10 bytes" in failed.reason
    assert "worker.memory_budget_bytes (9)" in failed.reason
    assert residency.demand("blk-a", 1.0) == []


def test_a_block_that_turns_out_larger_than_the_budget_fails_too() -> None:
    residency = Residency(20)
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    is_wanted, (failed,) = residency.loaded(block(), 21, 1.0)
    assert not is_wanted
    assert isinstance(failed, steps.FailBlock)
    assert state(residency) is BlockState.FAILED
    residency.released(21, 2.0)
    assert residency.occupied_bytes == 0
    assert reload(residency, LAZY, "a", 2) == [steps.RestBlock("blk-a")], "its settings may be others"


def test_a_block_that_turns_out_larger_than_its_files_makes_others_go() -> None:
    residency = in_memory(30, "a", "b")
    deploy(residency, LAZY, "c")
    residency.look(["blk-a"], [], 5.0)
    residency.demand("blk-c", 5.0)
    assert residency.loaded(block("c"), 15, 6.0) == (
        True,
        [steps.UnloadBlock("blk-b", "evicted"), steps.RestBlock("blk-b")],
    )


def test_the_size_that_was_measured_is_remembered_until_the_files_change() -> None:
    residency = Residency(40)
    deploy(residency, LAZY, "a")
    residency.demand("blk-a", 0.0)
    residency.loaded(block(), 30, 1.0)
    deploy(residency, LAZY, "b", now=2.0)
    residency.look([], [], 2.0)
    residency.tick(2.0)
    assert residency.demand("blk-b", 3.0) == [steps.LoadBlock(block("b"), DEMAND)]
    residency.loaded(block("b"), 20, 4.0)  # too much for both
    assert state(residency, "a") is BlockState.DORMANT
    residency.released(30, 5.0)
    residency.look([], [], 5.0)
    assert residency.demand("blk-a", 5.0) == [steps.UnloadBlock("blk-b", "evicted"), steps.RestBlock("blk-b")], (
        "30 are needed, not 10"
    )
    reload(residency, outlook_of(is_lazy=True, files_bytes=11), "a", 2, now=6.0)
    assert residency.held["blk-a"].size_bytes == 11


def test_what_keeps_sessions_is_not_evicted_while_they_may_live() -> None:
    residency = in_memory(10, "a", outlook=outlook_of(files_bytes=10, keep_s=60.0))
    deploy(residency, LAZY, "b")
    residency.look([], [], 30.0)
    assert residency.demand("blk-b", 30.0) == []
    assert residency.tick(60.0) == [steps.UnloadBlock("blk-a", "evicted"), steps.RestBlock("blk-a")]


def test_somebody_who_loads_an_eager_block_anew_may_have_its_room() -> None:
    residency = in_memory(10, "a")
    deploy(residency, EAGER, "b")
    assert state(residency, "b") is BlockState.DORMANT
    residency.look([], [], 5.0)
    assert reload(residency, EAGER, "b", 2, now=5.0) == [
        steps.UnloadBlock("blk-a", "evicted"),
        steps.RestBlock("blk-a"),
    ]
    assert state(residency, "b") is BlockState.LOADING
    assert residency.released(10, 6.0) == [steps.LoadBlock(block("b", 2), START)]


def test_an_eager_block_that_gets_no_room_when_loaded_anew_rests_in_the_end() -> None:
    residency = in_memory(10, "a")
    deploy(residency, EAGER, "b")
    residency.look(["blk-a"], [], 5.0)
    assert reload(residency, EAGER, "b", 2, now=5.0) == []
    assert residency.tick(65.0) == [steps.RestBlock("blk-b")]


# --- long lives


class World:
    """A worker that does as residency says, with jobs that come and go, and faults."""

    def __init__(self, seed: int, budget: int) -> None:
        self.random = Random(seed)
        self.budget = budget
        self.now = 0.0
        self.residency = Residency(budget)
        self.names = [f"m{number}" for number in range(6)]
        self.revisions = dict.fromkeys(self.names, 0)
        self.wanted: dict[str, Assigned] = {}
        self.outlooks: dict[Assigned, Outlook] = {}
        self.surveys: list[Assigned] = []
        self.loading: steps.LoadBlock | None = None
        self.room = 0  # that is kept for it
        self.resident: dict[str, int] = {}
        self.leaving: list[int] = []
        self.running: Counter[str] = Counter()
        self.used: dict[str, float] = {}
        self.waiting: dict[str, list[float]] = {}  # of dormant blocks: since when
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
        self.look()
        (event,) = self.random.choices(list(events), list(events.values()))
        event()
        self.check()

    def look(self) -> None:
        self.residency.look([each for each, jobs in self.running.items() if jobs], [], self.now)

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
            self.outlooks[assigned] = outlook_of(
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
            self.residency.look([], [block_id], self.now)
            self.look()

    def survey_ends(self, may_fail: bool = True) -> None:
        if self.surveys:
            surveyed = self.surveys.pop(self.random.randrange(len(self.surveys)))
            if may_fail and self.random.random() < 0.05:
                self.perform(self.residency.failed(surveyed, "unreadable", self.now))
            else:
                self.perform(self.residency.surveyed(surveyed, self.outlooks[surveyed], self.now))

    def load_ends(self, may_fail: bool = True) -> None:
        if self.loading is None:
            return
        loaded, self.loading, self.room = self.loading.block, None, 0
        if may_fail and self.random.random() < 0.1:
            self.perform(self.residency.failed(loaded, "broken", self.now))
            return
        size = self.outlooks[loaded].files_bytes + self.random.choice([0, 0, 0, 5, 60])
        is_wanted, actions = self.residency.loaded(loaded, size, self.now)
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
            self.perform(self.residency.released(size, self.now))

    def tick(self) -> None:
        self.now += self.random.choice([0.05, 0.5, 1.0])
        self.look()
        for block_id, since in self.waiting.items():
            in_time = [arrived for arrived in since if arrived + 5.0 > self.now]
            self.ended["late"] += len(since) - len(in_time)
            self.waiting[block_id] = in_time
        self.perform(self.residency.tick(self.now))
        if self.residency.occupied_bytes - sum(self.leaving) > self.budget:
            for block_id in self.resident:
                held = self.residency.held[block_id]
                is_pinned = self.running[block_id] or held.state is not BlockState.READY or held.leaves <= self.now
                assert is_pinned or self.is_kept(block_id) or self.is_replaced(), "it could have made room"

    # --- what was decided

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case steps.SurveyBlocks(blocks):
                    self.surveys += blocks
                case steps.LoadBlock():
                    self.start_load(action)
                case steps.RestBlock(block_id):
                    assert block_id not in self.resident
                    self.waiting.setdefault(block_id, [])
                case steps.UnloadBlock(block_id, event):
                    self.unload(block_id, event)
                case steps.ForgetBlock(block_id):
                    self.ended["handed back"] += len(self.waiting.pop(block_id, []))
                case steps.FailBlock(failed):
                    self.ended["failed"] += len(self.waiting.pop(failed.block_id, []))

    def start_load(self, action: steps.LoadBlock) -> None:
        assert self.loading is None, "one at a time"
        held = self.residency.held[action.block.block_id]
        assert held.block == action.block
        assert (action.why is RELOAD) == (held.block.block_id in self.resident)
        if action.why is not RELOAD:
            staying = [each for each in action.block.replaces if each in self.resident]
            replaced = sum(self.resident[each] for each in staying if self.residency.held[each].leaves > self.now)
            self.room = max(0, held.size_bytes - replaced)
            assert action.block.replaces or self.residency.occupied_bytes <= self.budget, (
                "only a reload may need more than there is"
            )
        self.loading = action

    def unload(self, block_id: str, event: str) -> None:
        self.leaving.append(self.resident.pop(block_id))
        if event == "unloaded":
            self.ended["answered"] += self.running.pop(block_id, 0)
            return
        assert not self.running[block_id], "what has jobs stays"
        assert not self.is_kept(block_id)
        assert self.loading is None or self.loading.block.block_id != block_id, "it is being reloaded"

    def is_kept(self, block_id: str) -> bool:
        outlook = self.residency.held[block_id].outlook
        return outlook is not None and self.now - self.used[block_id] < outlook.keep_s

    def is_replaced(self) -> bool:
        """Some block is only for the moment beside what replaces it."""
        return any(held.block.replaces and held.is_resident for held in self.residency.held.values())

    def check(self) -> None:
        here = sum(self.running.values()) + sum(map(len, self.waiting.values()))
        assert self.asked == here + sum(self.ended.values()), "no job is lost and none ends twice"
        assert self.residency.occupied_bytes == sum(self.resident.values()) + sum(self.leaving) + self.room
        for block_id, held in self.residency.held.items():
            assert held.is_resident == (block_id in self.resident)
            if held.state is BlockState.DORMANT:
                assert block_id in self.waiting, "what is dormant takes jobs"

    def come_to_rest(self) -> None:
        """Nothing more is asked for, and nothing fails any more."""
        for _ in range(200):
            self.look()
            self.survey_ends(may_fail=False)
            self.load_ends(may_fail=False)
            self.release()
            for _ in range(20):
                self.finish()
            self.tick()
            self.check()


@pytest.mark.parametrize("seed", range(40))
def test_a_random_life_keeps_its_promises(seed: int) -> None:
    world = World(seed, budget=Random(seed).choice([0, 50, 100]) or 10**9)
    for _ in range(3000):
        world.step()
    assert world.asked > 200, "there was life"
    world.come_to_rest()
    assert not any(world.waiting.values()), "whoever waited was served or told"
    assert not any(world.running.values())
    assert not world.surveys
    assert world.loading is None
    assert not world.leaving


# --- room on a GPU


def on_gpu(device_bytes: int = 50, told_bytes: int = 0, total_bytes: int = 100) -> Outlook:
    residence = Residence(max_waiting_s=60.0, device_memory_bytes=told_bytes)
    return Outlook(residence, 0.0, 10, "cuda:0", told_bytes or device_bytes, total_bytes)


def free(size_bytes: int, claimed_bytes: int = 0) -> dict[str, DeviceRoom]:
    return {"cuda:0": DeviceRoom(size_bytes, claimed_bytes)}


def loaded_there(residency: Residency, name: str, device_bytes: int, now: float = 0.0) -> None:
    residency.look((), (), now)
    is_wanted, _ = residency.loaded(block(name), 10, now, ("cuda:0", device_bytes))
    assert is_wanted


def test_a_block_waits_until_it_is_known_what_is_free() -> None:
    residency = Residency()
    assert deploy(residency, on_gpu(), "a") == []
    assert residency.devices_wanted() == {"cuda:0"}
    residency.look((), (), 1.0, free(50))
    assert residency.tick(1.0) == [steps.LoadBlock(block("a"), START, "cuda:0", 50)]
    loaded_there(residency, "a", 30)
    assert residency.devices_wanted() == set()


def test_what_a_gpu_could_never_hold_fails_and_says_what_there_is() -> None:
    residency = Residency()
    (failed,) = deploy(residency, on_gpu(2 * 2**30, total_bytes=2**30), "a")
    assert isinstance(failed, steps.FailBlock)
    assert failed.is_device_full
    assert "it needs 2.0 GiB on cuda:0, which has 1.0 GiB in all" in failed.reason


def test_what_does_not_fit_at_the_start_is_dormant_with_the_reason_and_waits_when_it_is_wanted() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50 * 2**20, total_bytes=2**30), "a")
    residency.look((), (), 1.0, free(2**20))
    assert residency.tick(1.0) == [steps.RestBlock("blk-a")]
    assert state(residency) is BlockState.DORMANT
    assert "it needs 50 MiB on cuda:0, where 1 MiB are free" in residency.held["blk-a"].reason
    assert residency.demand("blk-a", 2.0) == []
    residency.look((), (), 3.0, free(2**20))
    assert residency.tick(3.0) == []
    assert residency.lacks_device("blk-a")
    assert residency.is_short_of_device()
    assert "where 1 MiB are free" in residency.why_waiting("blk-a")
    residency.look((), (), 4.0, free(60 * 2**20))
    assert residency.tick(4.0) == [steps.LoadBlock(block("a"), DEMAND, "cuda:0", 50 * 2**20)]


def test_idle_blocks_of_the_same_gpu_make_room_and_no_others() -> None:
    residency = Residency()
    deploy(residency, EAGER, "cpu")
    assert residency.loaded(block("cpu"), 10, 0.0)[0]
    for second, name in enumerate(("old", "new"), start=1):
        deploy(residency, on_gpu(), name)
        residency.look((), (), second, free(100))
        residency.tick(second)
        loaded_there(residency, name, 30, second)
    deploy(residency, on_gpu(60), "a")
    residency.look((), (), 5.0, free(40))
    assert residency.tick(5.0) == [steps.RestBlock("blk-a")]
    residency.look((), (), 6.0, free(40))
    assert residency.demand("blk-a", 6.0) == [steps.UnloadBlock("blk-old", "evicted"), steps.RestBlock("blk-old")]
    residency.look((), (), 7.0, free(40))
    assert residency.tick(7.0) == []  # what goes has not gone: nobody else must
    residency.look((), (), 8.0, free(70))
    assert residency.released(10, 8.0) == [steps.LoadBlock(block("a"), DEMAND, "cuda:0", 60)]


def test_a_load_that_ran_out_of_memory_needs_more_than_was_free() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.look((), (), 1.0, free(80))
    residency.tick(1.0)
    residency.look((), (), 2.0, free(80))
    (failed,) = residency.failed(block("a"), "out of memory", 2.0, is_device_full=True)
    assert failed == steps.FailBlock(block("a"), "out of memory", is_device_full=True)
    assert residency.surveyed(block("a"), on_gpu(50), 17.0) == []
    residency.look((), (), 18.0, free(80))
    assert residency.tick(18.0) == []
    residency.look((), (), 19.0, free(81))
    assert residency.tick(19.0) == [steps.LoadBlock(block("a"), START, "cuda:0", 81)]


def test_what_a_load_took_counts_from_then_on_unless_the_settings_say_otherwise() -> None:
    residency = Residency()
    for name, outlook, expected in (("a", on_gpu(50), 30), ("b", on_gpu(told_bytes=45), 45)):
        deploy(residency, outlook, name)
        residency.look((), (), 1.0, free(100))
        residency.tick(1.0)
        loaded_there(residency, name, 30)
        assert residency.held[f"blk-{name}"].device_bytes == expected


def test_a_reload_without_room_beside_what_serves_fails_and_the_old_one_serves_on() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.look((), (), 1.0, free(100))
    residency.tick(1.0)
    loaded_there(residency, "a", 60)
    assert reload(residency, on_gpu(50), "a", 2, 2.0) == []
    residency.look((), (), 3.0, free(40))
    (failed,) = residency.tick(3.0)
    assert isinstance(failed, steps.FailBlock)
    assert failed.is_device_full
    assert residency.held["blk-a"].is_resident


def test_a_load_whose_room_another_worker_claims_is_begun_later() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.look((), (), 1.0, free(50))
    (load,) = residency.tick(1.0)
    residency.postponed(block("a"))
    assert residency.tick(1.1) == []
    residency.look((), (), 1.2, free(50))
    assert residency.tick(1.2) == [load]


def test_while_others_load_there_nothing_is_given_up_or_evicted() -> None:
    residency = Residency()
    deploy(residency, on_gpu(50), "a")
    residency.look((), (), 1.0, free(20, claimed_bytes=40))
    assert residency.tick(1.0) == []
    residency.look((), (), 2.0, free(60))
    assert residency.tick(2.0) == [steps.LoadBlock(block("a"), START, "cuda:0", 50)]
    assert residency.devices_wanted() == {"cuda:0"}  # what is free when a load fails counts, too
