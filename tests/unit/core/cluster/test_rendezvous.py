"""Owners of sessions: all gateways compute the same owner, and few sessions move."""

from penstock.core.cluster.rendezvous import SessionOwners

KEYS = [f"session-{n}" for n in range(2_000)]


def test_the_owner_does_not_depend_on_the_order_of_the_list() -> None:
    one, other = SessionOwners(1, ["a", "b", "c"]), SessionOwners(7, ["c", "a", "b"])
    assert [one.find_owner(key) for key in KEYS] == [other.find_owner(key) for key in KEYS]
    shares = [sum(one.find_owner(key) == gateway for key in KEYS) for gateway in "abc"]
    assert min(shares) > 500
    assert SessionOwners(1, []).find_owner("s") == ""


def test_only_sessions_of_a_leaving_or_new_gateway_move() -> None:
    three, two = SessionOwners(1, ["a", "b", "c"]), SessionOwners(2, ["a", "b"])
    moved = [key for key in KEYS if three.find_owner(key) != two.find_owner(key)]
    assert all(three.find_owner(key) == "c" for key in moved)
    assert {two.find_owner(key) for key in moved} == {"a", "b"}
