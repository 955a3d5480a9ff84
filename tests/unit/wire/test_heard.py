"""What follows what was heard: deltas in their order, everything after a gap, and no manager of the past."""

from dataclasses import dataclass

from penstock.wire.heard import Heard, Verdict


@dataclass
class Message:
    epoch: int
    revision: int
    since: int = 0
    is_snapshot: bool = False
    history: str = "h1"


def test_a_snapshot_and_then_what_follows_it() -> None:
    heard = Heard()
    assert heard.hear(Message(3, 10, is_snapshot=True)) is Verdict.TAKEN
    assert heard.hear(Message(3, 11, since=10)) is Verdict.TAKEN
    assert heard.hear(Message(3, 15, since=11)) is Verdict.TAKEN
    assert (heard.epoch, heard.revision) == (3, 15)


def test_a_gap_wants_everything() -> None:
    heard = Heard()
    assert heard.hear(Message(3, 2, since=1)) is Verdict.MISSED, "nothing was heard yet"
    assert heard.hear(Message(3, 2, is_snapshot=True)) is Verdict.TAKEN
    assert heard.hear(Message(3, 4, since=3)) is Verdict.MISSED
    assert heard.revision == 0
    assert heard.hear(Message(3, 5, since=2)) is Verdict.MISSED, "until everything has come"
    assert heard.hear(Message(3, 5, is_snapshot=True)) is Verdict.TAKEN
    assert heard.hear(Message(4, 6, since=5)) is Verdict.MISSED, "revisions are an epoch's own"


def test_an_older_epoch_is_not_obeyed() -> None:
    heard = Heard()
    assert heard.hear(Message(7, 1, is_snapshot=True)) is Verdict.TAKEN
    assert heard.hear(Message(6, 9, is_snapshot=True)) is Verdict.DEPOSED
    assert heard.hear(Message(6, 10, since=1)) is Verdict.DEPOSED
    assert (heard.epoch, heard.revision) == (7, 1)
    assert heard.hear(Message(8, 0, is_snapshot=True)) is Verdict.TAKEN, "a successor's counts begin anew"


def test_another_history_begins_with_everything_and_the_one_before_is_over() -> None:
    heard = Heard()
    assert heard.hear(Message(7, 5, is_snapshot=True)) is Verdict.TAKEN
    assert heard.hear(Message(2, 6, since=5, history="h2")) is Verdict.MISSED
    assert heard.hear(Message(7, 6, since=5, history="h2")) is Verdict.MISSED, "the same numbers are others there"
    assert heard.hear(Message(2, 3, is_snapshot=True, history="h2")) is Verdict.TAKEN
    assert (heard.history, heard.epoch, heard.revision) == ("h2", 2, 3)
    assert heard.hear(Message(9, 9, is_snapshot=True, history="h1")) is Verdict.DEPOSED
    assert heard.hear(Message(1, 9, is_snapshot=True, history="h2")) is Verdict.DEPOSED
    assert heard.hear(Message(2, 4, since=3, history="h2")) is Verdict.TAKEN
