"""Which worker a client goes to that goes direct."""

import pytest

from penstock.core.cluster.places import owner_of
from penstock.manager.direct.choice import Candidate, Distance, can_reach, choose, distance

HERE, NEAR, FAR = Distance.SAME_HOST, Distance.SAME_ZONE, Distance.ELSEWHERE


def worker(name: str, is_resident: bool = True, far: Distance = FAR, load: float = 0.0) -> Candidate:
    return Candidate(name, is_resident, far, load)


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([], ""),
        ([worker("a", load=2), worker("b", load=1)], "b"),
        ([worker("a", load=0), worker("b", far=NEAR, load=9)], "b"),
        ([worker("a", far=NEAR), worker("b", far=HERE, load=9)], "b"),
        ([worker("a", is_resident=False, far=HERE), worker("b", load=9)], "b"),
        ([worker("b"), worker("a")], "a"),
    ],
)
def test_what_is_loaded_comes_before_what_is_near_and_that_before_what_is_idle(
    candidates: list[Candidate], best: str
) -> None:
    assert choose(candidates) == best


def test_who_is_to_be_avoided_is_not_taken_even_where_there_is_no_other() -> None:
    assert choose([worker("a"), worker("b", load=5)], avoid={"a"}) == "b"
    assert choose([worker("a")], avoid={"a"}) == ""


def test_a_session_goes_where_the_routers_hash_says_whatever_the_load() -> None:
    workers = [worker(name, load=number) for number, name in enumerate("edcba")]
    for session in ("s-1", "s-2", "s-3"):
        owner = owner_of("abcde", session)
        assert choose(workers, session) == owner
        assert choose(workers, session, {owner}) == owner_of(sorted({*"abcde"} - {owner}), session)


def test_a_door_on_loopback_is_for_its_own_machine() -> None:
    assert distance("z", "h", "z", {"h", "node"}) is HERE
    assert distance("z", "", "z", {"h", ""}) is NEAR
    assert distance("", "h", "", {"i"}) is FAR
    assert can_reach("127.0.0.1:0", HERE)
    assert not can_reach("127.0.0.1:7000", NEAR)
    assert not can_reach("[::1]:7000", FAR)
    assert can_reach("10.0.0.1:0", FAR)
