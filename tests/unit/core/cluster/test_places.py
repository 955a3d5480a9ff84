"""Who owns a session: all agree, and few sessions move."""

from penstock.core.cluster.places import Owners

KEYS = [f"session-{n}" for n in range(2_000)]


def test_all_find_the_same_whatever_the_order_of_the_list() -> None:
    one, other = Owners(1, ["a", "b", "c"]), Owners(7, ["c", "a", "b"])
    assert [one.of(key) for key in KEYS] == [other.of(key) for key in KEYS]
    shares = [sum(one.of(key) == gateway for key in KEYS) for gateway in "abc"]
    assert min(shares) > 500
    assert Owners(1, []).of("s") == ""


def test_one_that_goes_leaves_its_own_and_one_that_comes_takes_its_share() -> None:
    three, two = Owners(1, ["a", "b", "c"]), Owners(2, ["a", "b"])
    moved = [key for key in KEYS if three.of(key) != two.of(key)]
    assert all(three.of(key) == "c" for key in moved)
    assert {two.of(key) for key in moved} == {"a", "b"}
