"""Which partitions are needed, and which are too old."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.features.request_log.partitions import TimeSpan, find_expired_spans, find_missing_spans, is_covered


def test_partitions_are_on_a_grid() -> None:
    assert find_missing_spans([], 25, 41, 10) == [TimeSpan(20, 30), TimeSpan(30, 40), TimeSpan(40, 50)]
    assert find_missing_spans([TimeSpan(20, 30), TimeSpan(30, 40)], 25, 41, 10) == [TimeSpan(40, 50)]
    assert find_missing_spans([TimeSpan(20, 30)], 25, 29, 10) == []


def test_partitions_of_an_earlier_grid_stay_and_the_gaps_between_are_filled() -> None:
    assert find_missing_spans([TimeSpan(15, 28)], 12, 31, 10) == [TimeSpan(10, 15), TimeSpan(28, 30), TimeSpan(30, 40)]


def test_a_partition_expires_when_its_last_moment_does() -> None:
    assert find_expired_spans([TimeSpan(0, 10), TimeSpan(10, 20)], 19) == [TimeSpan(0, 10)]
    assert find_expired_spans([TimeSpan(0, 10), TimeSpan(10, 20)], 20) == [TimeSpan(0, 10), TimeSpan(10, 20)]


SPANS = st.lists(st.integers(0, 200), min_size=2, max_size=8, unique=True).map(sorted)


@given(SPANS, st.integers(0, 200), st.integers(0, 60), st.integers(1, 50))
def test_what_is_missing_covers_the_rest_without_overlaps(edges: list[int], first: int, length: int, step: int) -> None:
    existing = [TimeSpan(*edges[i : i + 2]) for i in range(0, len(edges) - 1, 2)]
    found = find_missing_spans(existing, first, first + length, step)
    every = sorted([*existing, *found])
    assert all(before.end_us <= after.start_us for before, after in pairwise(every))
    assert all(0 < span.end_us - span.start_us <= step for span in found)
    assert is_covered(every, first, first + length)
    assert is_covered(existing, first, first + length) == (not found)
