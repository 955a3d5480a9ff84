"""The block of a route that answers: shares, sticky keys and sessions, and bounded trials."""

from collections import Counter
from random import Random

import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.routes import BlockShare, NameRoute, Sticky
from penstock.core.requests import InferRequest, Parameter
from penstock.core.settings import BlockSettings
from penstock.features.rollouts.splits import Split, choose_by_draw, choose_by_key

REQUESTS = 20_000


def block(block_id: str) -> BlockDescription:
    return BlockDescription(block_id, "m", "1", "onnxruntime_onnx", "fp32", (), (), 8, 1, BlockSettings())


BLOCKS = {name: block(name) for name in ("old", "new", "third")}


def route(sticky: Sticky = "none", key: str = "", **weights: float) -> NameRoute:
    return NameRoute("m", tuple(BlockShare(name, weight) for name, weight in weights.items()), sticky, key)


def split(asked: NameRoute) -> Split:
    return Split(asked, BLOCKS, Random(1).random)


def chosen(by: Split, **parameters: Parameter) -> str:
    return by.choose(InferRequest("m", [], parameters=parameters)).block_id


def test_a_random_draw_selects_by_weight() -> None:
    shares = [BlockShare("old", 90), BlockShare("new", 10)]
    assert [choose_by_draw(shares, draw) for draw in (0.0, 0.5, 0.899, 0.9, 0.999)] == [
        "old",
        "old",
        "old",
        "new",
        "new",
    ]


def test_requests_are_split_by_weight() -> None:
    by = split(route(old=95, new=5))
    found = Counter(chosen(by) for _ in range(REQUESTS))
    assert found["new"] / REQUESTS == pytest.approx(0.05, abs=0.01)


def test_keys_are_split_by_weight_and_stay_with_their_block() -> None:
    by = split(route("key", "user", old=1, new=3))
    found = {f"user-{number}": chosen(by, user=f"user-{number}") for number in range(REQUESTS)}
    assert Counter(found.values())["new"] / REQUESTS == pytest.approx(0.75, abs=0.02)
    other = Split(route("key", "user", old=1, new=3), BLOCKS, Random(2).random)  # another gateway's
    assert all(chosen(other, user=user) == block_id for user, block_id in found.items())


def test_a_changed_weight_moves_only_its_share_of_the_keys() -> None:
    keys = [f"user-{number}" for number in range(REQUESTS)]
    before = {key: choose_by_key([BlockShare("old", 95), BlockShare("new", 5)], "m", key) for key in keys}
    after = {key: choose_by_key([BlockShare("old", 75), BlockShare("new", 25)], "m", key) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert all(after[key] == "new" for key in moved)
    assert len(moved) / REQUESTS == pytest.approx(0.20, abs=0.01)


def test_a_new_block_takes_keys_from_the_others_and_moves_none_between_them() -> None:
    keys = [f"user-{number}" for number in range(REQUESTS)]
    before = {key: choose_by_key([BlockShare("old", 1), BlockShare("new", 1)], "m", key) for key in keys}
    after = {
        key: choose_by_key([BlockShare("old", 1), BlockShare("new", 1), BlockShare("third", 1)], "m", key)
        for key in keys
    }
    assert all(after[key] in (before[key], "third") for key in keys)
    assert Counter(after.values())["third"] / REQUESTS == pytest.approx(1 / 3, abs=0.02)


def test_requests_without_a_key_are_split_randomly() -> None:
    by = split(route("key", "user", old=1, new=1))
    assert Counter(chosen(by) for _ in range(REQUESTS))["new"] / REQUESTS == pytest.approx(0.5, abs=0.02)


def test_a_session_stays_with_its_block_when_weights_change() -> None:
    by = split(route(old=95, new=5))
    sessions = [f"s{number}" for number in range(1000)]
    before = {session: chosen(by, session_id=session) for session in sessions}
    assert set(before.values()) == {"old", "new"}
    by.update(route(old=0, new=100), BLOCKS)
    assert {session: chosen(by, session_id=session) for session in sessions} == before
    assert chosen(by, sequence_id=4711) == "new", "a new session follows the new weights"


def test_a_session_leaves_a_block_that_the_route_no_longer_names_or_that_is_gone() -> None:
    by = split(route(old=1, new=99))
    session = next(f"s{number}" for number in range(100) if chosen(by, session_id=f"s{number}") == "new")
    by.update(route(old=1), BLOCKS)
    assert chosen(by, session_id=session) == "old"
    by.update(route(old=1, new=99), {"new": BLOCKS["new"]})
    assert chosen(by, session_id=session) == "new"


def test_a_missing_block_gets_no_requests() -> None:
    by = Split(route(old=1, new=99), {"old": BLOCKS["old"]}, Random(1).random)
    assert {chosen(by) for _ in range(100)} == {"old"}
    assert by.primary is BLOCKS["old"]
    assert Split(route(old=1), {}, Random(1).random).primary is None


def test_the_heaviest_block_describes_the_name() -> None:
    assert split(route(old=40, new=60)).primary is BLOCKS["new"]


def test_a_block_on_trial_gets_no_more_requests_than_allowed() -> None:
    shares = (BlockShare("old", 1), BlockShare("new", 99))
    trial = NameRoute("m", shares, trial="new", allowance=50, began="r1")
    by = split(trial)
    assert Counter(chosen(by) for _ in range(1000))["new"] == 50
    by.update(NameRoute("m", shares, trial="new", allowance=70, began="r1"), BLOCKS)
    assert Counter(chosen(by) for _ in range(1000))["new"] == 20
    by.update(NameRoute("m", shares, trial="new", allowance=10, began="r2"), BLOCKS)
    assert Counter(chosen(by) for _ in range(1000))["new"] == 10
    by.update(NameRoute("m", shares), BLOCKS)
    assert Counter(chosen(by) for _ in range(1000))["new"] > 900


def test_a_share_of_the_requests_has_a_shadow() -> None:
    by = split(NameRoute("m", (BlockShare("old", 1),), shadow="new", shadow_share=0.25))
    assert sum(by.wants_shadow() for _ in range(REQUESTS)) / REQUESTS == pytest.approx(0.25, abs=0.02)
    assert not split(route(old=1)).wants_shadow()
