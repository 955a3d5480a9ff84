"""The choice of a worker for a direct client."""

import pytest

from penstock.core.cluster.rendezvous import find_owner
from penstock.features.direct.worker_choice import Candidate, Distance, can_reach, choose, compute_distance

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
def test_loaded_workers_are_preferred_to_near_ones_and_near_ones_to_idle_ones(
    candidates: list[Candidate], best: str
) -> None:
    assert choose(candidates) == best


def test_an_avoided_worker_is_not_chosen_even_if_it_is_the_only_one() -> None:
    assert choose([worker("a"), worker("b", load=5)], avoid={"a"}) == "b"
    assert choose([worker("a")], avoid={"a"}) == ""


def test_a_session_goes_to_the_worker_of_the_routers_hash_whatever_its_load() -> None:
    workers = [worker(name, load=number) for number, name in enumerate("edcba")]
    for session in ("s-1", "s-2", "s-3"):
        owner = find_owner("abcde", session)
        assert choose(workers, session) == owner
        assert choose(workers, session, {owner}) == find_owner(sorted({*"abcde"} - {owner}), session)


def test_an_endpoint_on_loopback_is_for_its_own_machine() -> None:
    assert compute_distance("z", "h", "z", {"h", "node"}) is HERE
    assert compute_distance("z", "", "z", {"h", ""}) is NEAR
    assert compute_distance("", "h", "", {"i"}) is FAR
    assert can_reach("127.0.0.1:0", HERE)
    assert not can_reach("127.0.0.1:7000", NEAR)
    assert not can_reach("[::1]:7000", FAR)
    assert can_reach("10.0.0.1:0", FAR)
