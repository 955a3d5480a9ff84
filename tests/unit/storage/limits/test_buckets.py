"""What may pass a bucket, by scripts of times: never more than its rate and its burst, and all or nothing."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.storage.limits.base import CONCURRENCY, Ask, Rate, Spend, Taken
from penstock.storage.limits.buckets import Buckets

REQUESTS = Rate("requests", 10.0, 1.0)
ROWS = Rate("rows", 100.0, 2.0)
TOKENS = Rate("tokens", 1000.0, 1.0)


def ask(*spends: tuple[Rate, float], key: str = "k", **more: Any) -> Ask:
    return Ask(key, tuple(Spend(*spend) for spend in spends), **more)


ONE = ask((REQUESTS, 1))


def test_a_burst_passes_and_then_as_many_as_are_made_good() -> None:
    buckets = Buckets()
    assert [buckets.take(ONE, 5.0).limit for _ in range(11)] == [""] * 10 + ["requests"]
    assert buckets.take(ONE, 5.0).retry_after_s == pytest.approx(0.1)
    assert buckets.take(ONE, 5.09).retry_after_s == pytest.approx(0.01)
    assert buckets.take(ONE, 5.1).limit == ""
    assert buckets.take(ONE, 5.1).limit == "requests"
    assert [buckets.take(ONE, 60.0).limit for _ in range(11)] == [""] * 10 + ["requests"]


def test_who_waits_as_told_passes() -> None:
    buckets = Buckets()
    for _ in range(10):
        buckets.take(ONE, 0.0)
    now = 0.0
    for _ in range(100):
        now += buckets.take(ONE, now).retry_after_s
        assert buckets.take(ONE, now).limit == ""


def test_all_dimensions_are_taken_or_none_and_the_longest_wait_is_told() -> None:
    buckets = Buckets()
    assert buckets.take(ask((REQUESTS, 1), (ROWS, 200)), 0.0) == Taken((0.1, 2.0))
    refused = buckets.take(ask((REQUESTS, 1), (ROWS, 50)), 0.0)
    assert (refused.limit, refused.retry_after_s) == ("rows", 0.5)
    assert refused.used_s == (0.1, 2.0)
    assert buckets.take(ask((REQUESTS, 9)), 0.0).limit == ""  # no request was taken with the rows that were refused


def test_callers_do_not_see_each_other() -> None:
    buckets = Buckets()
    assert all(buckets.take(ask((REQUESTS, 10), key=f"k{n}"), 0.0).limit == "" for n in range(100))


def test_what_is_larger_than_the_bucket_needs_it_empty_and_is_owed_afterwards() -> None:
    buckets = Buckets()
    large = ask((ROWS, 1000))
    assert buckets.take(large, 0.0).used_s == (10.0,)
    assert buckets.take(large, 1.0).retry_after_s == pytest.approx(9.0)
    assert buckets.take(ask((ROWS, 1)), 1.0).retry_after_s == pytest.approx(7.01)
    assert buckets.take(large, 10.0).limit == ""


def test_a_rate_below_one_a_second_lets_one_at_a_time_pass() -> None:
    buckets = Buckets()
    slow = ask((Rate("requests", 0.1, 1.0), 1))
    assert buckets.take(slow, 0.0).limit == ""
    assert buckets.take(slow, 0.0).retry_after_s == pytest.approx(10.0)
    assert buckets.take(slow, 10.0).limit == ""


def test_what_is_owed_is_taken_whatever_is_left_and_the_next_waits() -> None:
    buckets = Buckets()
    later = ask((REQUESTS, 1), (TOKENS, 0))
    assert buckets.take(later, 0.0).limit == ""
    assert buckets.take(ask((TOKENS, 5000), is_owed=True), 0.0).limit == ""
    refused = buckets.take(later, 1.0)
    assert refused.limit == "tokens"
    assert refused.retry_after_s == pytest.approx(3.001)
    assert buckets.take(later, 4.01).limit == ""


def test_no_more_than_the_slots_are_held_and_a_rate_that_also_refuses_says_when() -> None:
    buckets = Buckets()
    assert buckets.take(ask((REQUESTS, 10), slots=2, held=2), 0.0).limit == ""
    assert buckets.take(ask(slots=2, held=3), 0.0).limit == CONCURRENCY
    refused = buckets.take(ask((REQUESTS, 9), slots=2, held=3), 0.0)
    assert refused.limit == "requests"
    assert refused.retry_after_s == pytest.approx(0.9)


def test_one_of_several_has_its_share() -> None:
    buckets = Buckets()
    assert [buckets.take(ONE, 0.0, share=2).limit for _ in range(6)] == [""] * 5 + ["requests"]
    assert buckets.take(ONE, 0.0, share=2).retry_after_s == pytest.approx(0.2)
    assert buckets.take(ask(slots=3, held=2), 0.0, share=2).limit == ""
    assert buckets.take(ask(slots=3, held=3), 0.0, share=2).limit == CONCURRENCY
    assert buckets.take(ask(slots=1, held=1), 0.0, share=9).limit == ""


def test_what_a_shared_store_says_is_foreseen_and_what_it_lacks_is_told() -> None:
    buckets = Buckets()
    assert buckets.floors(ONE, 0.0) == (False, (0.0,))
    buckets.set(ONE, Taken((1.0,)), 0.0)
    assert buckets.floors(ONE, 0.0) == (False, (1.0,))
    foreseen = buckets.foresee(ONE, 0.05)
    assert foreseen is not None
    assert foreseen.retry_after_s == pytest.approx(0.05)
    assert buckets.foresee(ONE, 0.1) is None
    assert buckets.take(ONE, 0.2, share=2).limit == ""
    is_ahead, (floor_s,) = buckets.floors(ONE, 0.2)
    assert is_ahead
    assert floor_s == pytest.approx(1.0)
    buckets.set(ONE, Taken((0.4,)), 0.2)
    is_ahead, (floor_s,) = buckets.floors(ONE, 0.2)
    assert not is_ahead
    assert floor_s == pytest.approx(0.4)


def test_few_are_remembered_and_first_those_who_owe_nothing_are_forgotten() -> None:
    buckets = Buckets(max_keys=100)
    for n in range(1000):
        buckets.take(ask((REQUESTS, 1), key=f"k{n}"), n * 1.0)
    assert len(buckets) <= 3
    for n in range(1000):
        buckets.take(ask((REQUESTS, 10), key=f"j{n}"), 2000.0)
        buckets.take(ask((REQUESTS, 1), key="j0"), 2000.0)
    assert len(buckets) == 100
    assert buckets.take(ask((REQUESTS, 10), key="j999"), 2000.0).limit == "requests"
    assert buckets.take(ask((REQUESTS, 10), key="j1"), 2000.0).limit == ""  # forgotten


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 7), st.integers(0, 30)), max_size=60),
    burst_s=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    share=st.integers(1, 3),
)
def test_no_window_has_more_than_its_rate_and_one_burst(
    steps: list[tuple[float, int, int]], burst_s: float, share: int
) -> None:
    """Whatever comes when, and however large: beyond the burst, one ask at most goes into debt."""
    rates = Rate("requests", 7.0, burst_s), Rate("rows", 20.0, burst_s)
    buckets, now = Buckets(), 0.0
    passed: list[tuple[float, tuple[float, ...]]] = []
    for pause, *costs in steps:
        now += pause
        asked = ask(*zip(rates, costs, strict=True))
        before = buckets.floors(asked, now)
        taken = buckets.take(asked, now, share)
        if taken.limit:
            assert taken.retry_after_s > 0
            assert buckets.floors(asked, now) == before
        else:
            passed.append((now, tuple(costs)))
    for index, rate in enumerate(rates):
        for first in range(len(passed)):
            sums = [costs[index] for _, costs in passed[first:]]
            span = now - passed[first][0]
            assert sum(sums) <= (span + burst_s) * rate.per_s / share + max(sums, default=0) + 1e-6
