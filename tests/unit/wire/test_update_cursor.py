"""Updates in order, a snapshot after a gap, and none from a former manager."""

from dataclasses import dataclass

from penstock.wire.update_cursor import UpdateCursor, UpdateVerdict


@dataclass
class Message:
    epoch: int
    revision: int
    since: int = 0
    is_snapshot: bool = False
    history: str = "h1"


def test_a_snapshot_is_followed_by_changes() -> None:
    cursor = UpdateCursor()
    assert cursor.receive(Message(3, 10, is_snapshot=True)) is UpdateVerdict.ACCEPTED
    assert cursor.receive(Message(3, 11, since=10)) is UpdateVerdict.ACCEPTED
    assert cursor.receive(Message(3, 15, since=11)) is UpdateVerdict.ACCEPTED
    assert (cursor.epoch, cursor.revision) == (3, 15)


def test_after_a_gap_everything_is_requested() -> None:
    cursor = UpdateCursor()
    assert cursor.receive(Message(3, 2, since=1)) is UpdateVerdict.MISSED, "no update was received before"
    assert cursor.receive(Message(3, 2, is_snapshot=True)) is UpdateVerdict.ACCEPTED
    assert cursor.receive(Message(3, 4, since=3)) is UpdateVerdict.MISSED
    assert cursor.revision == 0
    assert cursor.receive(Message(3, 5, since=2)) is UpdateVerdict.MISSED, "a snapshot must come first"
    assert cursor.receive(Message(3, 5, is_snapshot=True)) is UpdateVerdict.ACCEPTED
    assert cursor.receive(Message(4, 6, since=5)) is UpdateVerdict.MISSED, "each epoch counts its own revisions"


def test_updates_of_an_older_term_are_ignored() -> None:
    cursor = UpdateCursor()
    assert cursor.receive(Message(7, 1, is_snapshot=True)) is UpdateVerdict.ACCEPTED
    assert cursor.receive(Message(6, 9, is_snapshot=True)) is UpdateVerdict.DEPOSED
    assert cursor.receive(Message(6, 10, since=1)) is UpdateVerdict.DEPOSED
    assert (cursor.epoch, cursor.revision) == (7, 1)
    assert cursor.receive(Message(8, 0, is_snapshot=True)) is UpdateVerdict.ACCEPTED, (
        "a new leader counts revisions from 0"
    )


def test_a_new_history_starts_with_a_snapshot_and_ends_the_former() -> None:
    cursor = UpdateCursor()
    assert cursor.receive(Message(7, 5, is_snapshot=True)) is UpdateVerdict.ACCEPTED
    assert cursor.receive(Message(2, 6, since=5, history="h2")) is UpdateVerdict.MISSED
    assert cursor.receive(Message(7, 6, since=5, history="h2")) is UpdateVerdict.MISSED, (
        "another history counts its own epochs"
    )
    assert cursor.receive(Message(2, 3, is_snapshot=True, history="h2")) is UpdateVerdict.ACCEPTED
    assert (cursor.history, cursor.epoch, cursor.revision) == ("h2", 2, 3)
    assert cursor.receive(Message(9, 9, is_snapshot=True, history="h1")) is UpdateVerdict.DEPOSED
    assert cursor.receive(Message(1, 9, is_snapshot=True, history="h2")) is UpdateVerdict.DEPOSED
    assert cursor.receive(Message(2, 4, since=3, history="h2")) is UpdateVerdict.ACCEPTED
