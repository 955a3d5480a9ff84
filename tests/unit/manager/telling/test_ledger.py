"""The ledger: a change is told once, to those who have not heard of it, and everything to those who missed some."""

import random

from penstock.manager.telling.ledger import Ledger, LedgerDelta


class Follower:
    def __init__(self) -> None:
        self.revision = 0
        self.items: dict[str, int] = {}
        self.heard = 0

    def hear(self, delta: LedgerDelta[int]) -> None:
        assert delta.is_snapshot or delta.since == self.revision
        if delta.is_snapshot:
            self.items = {}
        self.items.update(delta.changed)
        for key in delta.removed:
            self.items.pop(key, None)  # it may have come and gone meanwhile
        self.revision = delta.revision
        self.heard += len(delta.changed) + len(delta.removed)


def test_everything_first_and_then_what_changed() -> None:
    ledger = Ledger[int]()
    ledger.put("a", 1)
    ledger.put("b", 2)
    first = ledger.since(0)
    assert (first.is_snapshot, first.changed) == (True, {"a": 1, "b": 2})
    ledger.put("a", 3)
    ledger.remove("b")
    then = ledger.since(first.revision)
    assert (then.is_snapshot, then.since, then.changed, then.removed) == (False, first.revision, {"a": 3}, ("b",))
    assert ledger.since(then.revision) == LedgerDelta(then.revision, then.revision, False, {})


def test_what_is_as_it_was_is_no_change() -> None:
    ledger = Ledger[int]()
    assert ledger.put("a", 1)
    assert not ledger.put("a", 1)
    assert not ledger.remove("b")
    assert not ledger.replace({"a": 1})
    assert ledger.revision == 1
    assert ledger.replace({"c": 1})
    assert ledger.since(1).changed == {"c": 1}
    assert ledger.since(1).removed == ("a",)


def test_an_empty_ledger_is_a_snapshot_of_nothing() -> None:
    assert Ledger[int]().since(0) == LedgerDelta(0, 0, True, {})


def test_a_change_that_was_undone_is_told_as_it_is_now() -> None:
    ledger = Ledger[int]()
    ledger.put("a", 1)
    seen = ledger.revision
    ledger.remove("a")
    ledger.put("a", 2)
    assert ledger.since(seen).changed == {"a": 2}
    assert ledger.since(seen).removed == ()


def test_whoever_missed_what_is_forgotten_gets_everything() -> None:
    ledger = Ledger[int](max_gone=4)
    for number in range(10):
        ledger.put(str(number), number)
    seen = ledger.revision
    for number in range(3):
        ledger.remove(str(number))
    assert not ledger.since(seen).is_snapshot
    near = ledger.revision
    for number in range(3, 6):
        ledger.remove(str(number))
    assert ledger.since(seen).is_snapshot
    assert ledger.since(near).removed == ("3", "4", "5")
    assert ledger.since(ledger.revision + 1).is_snapshot, "of another life of the manager"


def test_one_change_among_a_thousand_blocks_and_a_hundred_workers_is_one_change() -> None:
    view = Ledger[int]()
    assignments = [Ledger[int]() for _ in range(100)]
    for block in range(1000):
        view.put(f"blk-{block}", 1)
        for replica in range(2):
            assignments[(block + replica) % 100].put(f"blk-{block}", 1)
    gateway, workers = Follower(), [Follower() for _ in assignments]
    gateway.hear(view.since(0))
    for worker, ledger in zip(workers, assignments, strict=True):
        worker.hear(ledger.since(0))
    heard = gateway.heard + sum(worker.heard for worker in workers)
    assert heard == 3000
    view.put("blk-7", 2)
    assignments[7].put("blk-7", 2)
    gateway.hear(view.since(gateway.revision))
    told = [ledger.since(worker.revision) for worker, ledger in zip(workers, assignments, strict=True)]
    assert [index for index, delta in enumerate(told) if delta.revision != delta.since] == [7]
    workers[7].hear(told[7])
    assert gateway.heard + sum(worker.heard for worker in workers) == heard + 2
    assert gateway.items["blk-7"] == workers[7].items["blk-7"] == 2


def test_whoever_hears_at_any_time_has_what_is_there() -> None:
    rng = random.Random(13)
    ledger, followers = Ledger[int](max_gone=8), [Follower() for _ in range(5)]
    for step in range(5000):
        key = str(rng.randrange(40))
        if rng.random() < 0.5:
            ledger.put(key, step)
        else:
            ledger.remove(key)
        for follower in followers:
            if rng.random() < 0.1:
                follower.hear(ledger.since(follower.revision))
                assert follower.items == ledger.items()


def test_who_has_seen_an_earlier_ledger_gets_everything() -> None:
    earlier: Ledger[int] = Ledger()
    for key in "abc":
        earlier.put(key, 1)
    later: Ledger[int] = Ledger(after=earlier.revision)
    assert later.since(earlier.revision).is_snapshot
    for key in "xyz":
        later.put(key, 1)
    assert all(later.since(seen).is_snapshot for seen in range(earlier.revision + 1))
    assert not later.since(later.revision - 1).is_snapshot
