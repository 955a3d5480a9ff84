"""The versioned map: followers get each change once, and everything after a gap."""

import random

from penstock.manager.publishing.versioned_map import MapDelta, VersionedMap


class Follower:
    def __init__(self) -> None:
        self.revision = 0
        self.items: dict[str, int] = {}
        self.heard = 0

    def hear(self, delta: MapDelta[int]) -> None:
        assert delta.is_snapshot or delta.since_revision == self.revision
        if delta.is_snapshot:
            self.items = {}
        self.items.update(delta.changed)
        for key in delta.removed:
            self.items.pop(key, None)  # it may have come and gone since
        self.revision = delta.revision
        self.heard += len(delta.changed) + len(delta.removed)


def test_the_first_update_has_everything_and_later_ones_the_changes() -> None:
    published = VersionedMap[int]()
    published.put("a", 1)
    published.put("b", 2)
    first = published.read_since(0)
    assert (first.is_snapshot, first.changed) == (True, {"a": 1, "b": 2})
    published.put("a", 3)
    published.remove("b")
    then = published.read_since(first.revision)
    assert (then.is_snapshot, then.since_revision, then.changed, then.removed) == (
        False,
        first.revision,
        {"a": 3},
        ("b",),
    )
    assert published.read_since(then.revision) == MapDelta(then.revision, then.revision, False, {})


def test_writing_an_equal_value_is_not_a_change() -> None:
    published = VersionedMap[int]()
    assert published.put("a", 1)
    assert not published.put("a", 1)
    assert not published.remove("b")
    assert not published.replace({"a": 1})
    assert published.revision == 1
    assert published.replace({"c": 1})
    assert published.read_since(1).changed == {"c": 1}
    assert published.read_since(1).removed == ("a",)


def test_an_empty_map_is_a_snapshot_of_nothing() -> None:
    assert VersionedMap[int]().read_since(0) == MapDelta(0, 0, True, {})


def test_a_change_that_was_undone_is_sent_with_its_current_value() -> None:
    published = VersionedMap[int]()
    published.put("a", 1)
    seen = published.revision
    published.remove("a")
    published.put("a", 2)
    assert published.read_since(seen).changed == {"a": 2}
    assert published.read_since(seen).removed == ()


def test_a_follower_that_missed_forgotten_removals_gets_everything() -> None:
    published = VersionedMap[int](max_removed=4)
    for number in range(10):
        published.put(str(number), number)
    seen = published.revision
    for number in range(3):
        published.remove(str(number))
    assert not published.read_since(seen).is_snapshot
    near = published.revision
    for number in range(3, 6):
        published.remove(str(number))
    assert published.read_since(seen).is_snapshot
    assert published.read_since(near).removed == ("3", "4", "5")
    assert published.read_since(published.revision + 1).is_snapshot, "the follower has a revision of an earlier term"


def test_one_change_among_many_blocks_and_workers_is_one_update() -> None:
    view = VersionedMap[int]()
    assignments = [VersionedMap[int]() for _ in range(100)]
    for block in range(1000):
        view.put(f"blk-{block}", 1)
        for replica in range(2):
            assignments[(block + replica) % 100].put(f"blk-{block}", 1)
    gateway, workers = Follower(), [Follower() for _ in assignments]
    gateway.hear(view.read_since(0))
    for worker, published in zip(workers, assignments, strict=True):
        worker.hear(published.read_since(0))
    heard = gateway.heard + sum(worker.heard for worker in workers)
    assert heard == 3000
    view.put("blk-7", 2)
    assignments[7].put("blk-7", 2)
    gateway.hear(view.read_since(gateway.revision))
    told = [published.read_since(worker.revision) for worker, published in zip(workers, assignments, strict=True)]
    assert [index for index, delta in enumerate(told) if delta.revision != delta.since_revision] == [7]
    workers[7].hear(told[7])
    assert gateway.heard + sum(worker.heard for worker in workers) == heard + 2
    assert gateway.items["blk-7"] == workers[7].items["blk-7"] == 2


def test_followers_that_read_at_any_time_have_the_current_state() -> None:
    rng = random.Random(13)
    published, followers = VersionedMap[int](max_removed=8), [Follower() for _ in range(5)]
    for step in range(5000):
        key = str(rng.randrange(40))
        if rng.random() < 0.5:
            published.put(key, step)
        else:
            published.remove(key)
        for follower in followers:
            if rng.random() < 0.1:
                follower.hear(published.read_since(follower.revision))
                assert follower.items == published.get_items()


def test_a_follower_of_an_earlier_map_gets_everything() -> None:
    earlier: VersionedMap[int] = VersionedMap()
    for key in "abc":
        earlier.put(key, 1)
    later: VersionedMap[int] = VersionedMap(last_revision=earlier.revision)
    assert later.read_since(earlier.revision).is_snapshot
    for key in "xyz":
        later.put(key, 1)
    assert all(later.read_since(seen).is_snapshot for seen in range(earlier.revision + 1))
    assert not later.read_since(later.revision - 1).is_snapshot
