"""What a worker loads and lets go of."""

from penstock.core.blocks import BlockState
from penstock.worker.residency import Assigned, Load, Residency, Unload


def block(name: str = "a", revision: int = 1) -> Assigned:
    return Assigned(f"blk-{name}", name, "1", f"/models/{name}", revision)


def test_loads_what_is_new_and_lets_go_of_what_is_not_wanted() -> None:
    residency = Residency()
    assert residency.assign([block("a"), block("b")]) == [Load(block("a")), Load(block("b"))]
    assert residency.loaded(block("a")) == (True, [])
    assert residency.held["blk-a"].state is BlockState.READY
    assert residency.assign([block("b")]) == [Unload("blk-a")]


def test_the_same_assignment_twice_does_nothing() -> None:
    residency = Residency()
    residency.assign([block()])
    assert residency.assign([block()]) == []


def test_a_higher_revision_loads_anew_while_the_old_serves() -> None:
    residency = Residency()
    residency.assign([block()])
    residency.loaded(block())
    assert residency.assign([block(revision=2)]) == [Load(block(revision=2))]
    assert residency.held["blk-a"].state is BlockState.LOADING
    assert residency.failed(block(revision=2), "bad file") == []
    assert residency.held["blk-a"].reason == "bad file"
    assert residency.assign([]) == [Unload("blk-a")]


def test_what_was_withdrawn_while_it_loaded_is_not_taken_up() -> None:
    residency = Residency()
    residency.assign([block()])
    assert residency.assign([]) == []
    assert residency.loaded(block()) == (False, [])


def test_a_revision_that_came_while_loading_is_loaded_next() -> None:
    residency = Residency()
    residency.assign([block()])
    assert residency.assign([block(revision=3)]) == []
    assert residency.loaded(block()) == (False, [Load(block(revision=3))])
    assert residency.loaded(block(revision=3)) == (True, [])


def test_a_failed_block_is_tried_again_only_when_asked() -> None:
    residency = Residency()
    residency.assign([block()])
    residency.failed(block(), "broken")
    assert residency.assign([block()]) == []
    assert residency.assign([block(revision=2)]) == [Load(block(revision=2))]
