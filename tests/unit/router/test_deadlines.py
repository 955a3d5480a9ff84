"""Deadlines fall due in order."""

from penstock.router.deadlines import SWEEP_MARGIN, Deadlines


def make(gone: set[str]) -> Deadlines[str]:
    return Deadlines(lambda key, when: key not in gone)


def test_keys_come_in_order_of_time_and_then_of_addition() -> None:
    deadlines = make(set())
    for when, key in ((2.0, "c"), (1.0, "b"), (1.0, "a"), (3.0, "d")):
        deadlines.add(when, key)
    assert deadlines.peek_time() == 1.0
    assert [deadlines.pop(2.0) for _ in range(4)] == ["b", "a", "c", None]
    assert deadlines.peek_time() == 3.0
    assert deadlines.pop(3.0) == "d"
    assert deadlines.peek_time() is None


def test_a_stale_key_is_not_due() -> None:
    gone: set[str] = set()
    deadlines = make(gone)
    deadlines.add(1.0, "a")
    deadlines.add(2.0, "b")
    gone.add("a")
    assert deadlines.pop(2.0) == "b"


def test_stale_keys_are_removed_when_there_are_many() -> None:
    gone = {"x"}
    deadlines = make(gone)
    deadlines.add(9.0, "a")
    for number in range(3 * SWEEP_MARGIN):
        deadlines.add(10.0 - number / SWEEP_MARGIN, "x")
        assert len(deadlines) <= SWEEP_MARGIN + 2
    assert deadlines.pop(10.0) == "a"
