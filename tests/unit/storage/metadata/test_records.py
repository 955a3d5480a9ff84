"""Records in memory: revisions, compares, leases and the latest changes, by scripts of events."""

import pytest

from penstock.core.errors import Compacted, Conflict, InvalidRequest, LeaseLost
from penstock.storage.metadata.metadata_store import MAX_VALUE_BYTES, MAX_WRITES, Change, Compare, Record, Write
from penstock.storage.metadata.records import Records


def change(records: Records, *writes: Write, compares: tuple[Compare, ...] = ()) -> int:
    records.apply(records.plan(writes, compares), writes)
    return records.revision


def test_all_writes_of_a_change_have_one_revision() -> None:
    records = Records(revision=7)
    assert change(records, Write("a", b"1"), Write("b", b"2")) == 8
    assert records.take_snapshot("").records == (Record("a", b"1", 8), Record("b", b"2", 8))
    assert change(records, Write("a", None), Write("b", b"3")) == 9
    assert records.get("a") is None
    assert records.list_changes_since(7) == [
        (Change("a", b"1", 8), Change("b", b"2", 8)),
        (Change("a", None, 9), Change("b", b"3", 9)),
    ]


def test_deleting_an_absent_record_is_not_a_change() -> None:
    records = Records(revision=7)
    assert change(records, Write("a", None)) == 7
    assert records.list_changes_since(7) == []


def test_a_compare_that_fails_changes_nothing() -> None:
    records = Records()
    change(records, Write("a", b"1"))
    for compare in (Compare("a", 0), Compare("a", 2), Compare("b", 1)):
        with pytest.raises(Conflict, match=f"'{compare.key}' was changed"):
            records.plan([Write("c", b"x")], [Compare("a", 1), compare])
    assert records.revision == 1


def test_changes_are_bounded_and_a_gap_is_reported() -> None:
    records = Records(revision=5, max_changes=3)
    for value in range(4):
        change(records, Write("a", bytes([value])))
    assert [changes[0].revision for changes in records.list_changes_since(6)] == [7, 8, 9]
    for too_old in (4, 5):
        with pytest.raises(Compacted):
            records.list_changes_since(too_old)
    assert records.list_changes_since(100) == []


def test_changes_before_the_start_are_a_gap() -> None:
    with pytest.raises(Compacted):
        Records([Record("a", b"1", 3)], revision=5).list_changes_since(4)


def test_the_end_of_a_lease_deletes_its_keys() -> None:
    records = Records()
    lease = records.grant(2.0, now=10.0)
    change(records, Write("mine", b"1", lease), Write("also", b"1", lease), Write("kept", b"1"))
    assert records.keep_alive(lease, now=11.0) == 2.0
    assert records.list_ended_leases(12.9) == []
    assert records.find_next_lease_end() == 13.0
    assert records.list_ended_leases(13.0) == [lease]
    with pytest.raises(LeaseLost):
        records.keep_alive(lease, now=13.0)
    change(records, *records.plan_lease_end(lease))
    records.forget_lease(lease)
    assert [record.key for record in records.take_snapshot("").records] == ["kept"]
    with pytest.raises(LeaseLost):
        records.plan([Write("mine", b"1", lease)], [])


def test_a_key_written_again_leaves_its_lease() -> None:
    records = Records()
    first, second = records.grant(2.0, now=0.0), records.grant(2.0, now=0.0)
    change(records, Write("a", b"1", first), Write("b", b"1", first), Write("c", b"1", first))
    change(records, Write("a", b"2"), Write("b", b"2", second), Write("c", None))
    assert records.plan_lease_end(first) == []
    assert [write.key for write in records.plan_lease_end(second)] == ["b"]
    assert not records.is_leased("a")


def test_the_size_of_a_change_is_limited() -> None:
    records = Records()
    with pytest.raises(InvalidRequest, match="split it"):
        records.plan([Write(f"{number}", b"") for number in range(MAX_WRITES + 1)], [])
    with pytest.raises(InvalidRequest, match="split it"):
        records.plan([Write("a", bytes(MAX_VALUE_BYTES))], [])
