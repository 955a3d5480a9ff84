"""Buckets, by scripts of times: they admit no more than rate and burst allow, and take a charge as a whole."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.storage.limits.buckets import Buckets
from penstock.storage.limits.evicted_buckets import EvictedBuckets
from penstock.storage.limits.limit_store import CONCURRENCY, Charge, ChargeResult, Rate, Spend

REQUESTS = Rate("requests", 10.0, 1.0)
ROWS = Rate("rows", 100.0, 2.0)
TOKENS = Rate("tokens", 1000.0, 1.0)


def charge(*spends: tuple[Rate, float], key: str = "k", **more: Any) -> Charge:
    return Charge(key, tuple(Spend(*spend) for spend in spends), **more)


ONE = charge((REQUESTS, 1))


def test_a_burst_passes_and_then_as_many_as_the_rate_allows() -> None:
    buckets = Buckets()
    assert [buckets.take(ONE, 5.0).limit for _ in range(11)] == [""] * 10 + ["requests"]
    assert buckets.take(ONE, 5.0).retry_after_s == pytest.approx(0.1)
    assert buckets.take(ONE, 5.09).retry_after_s == pytest.approx(0.01)
    assert buckets.take(ONE, 5.1).limit == ""
    assert buckets.take(ONE, 5.1).limit == "requests"
    assert [buckets.take(ONE, 60.0).limit for _ in range(11)] == [""] * 10 + ["requests"]


def test_a_caller_that_waits_for_retry_after_passes() -> None:
    buckets = Buckets()
    for _ in range(10):
        buckets.take(ONE, 0.0)
    now = 0.0
    for _ in range(100):
        now += buckets.take(ONE, now).retry_after_s
        assert buckets.take(ONE, now).limit == ""


def test_all_rates_are_taken_or_none_and_the_longest_wait_is_reported() -> None:
    buckets = Buckets()
    assert buckets.take(charge((REQUESTS, 1), (ROWS, 200)), 0.0) == ChargeResult((0.1, 2.0))
    refused = buckets.take(charge((REQUESTS, 1), (ROWS, 50)), 0.0)
    assert (refused.limit, refused.retry_after_s) == ("rows", 0.5)
    assert refused.used_s == (0.1, 2.0)
    assert buckets.take(charge((REQUESTS, 9)), 0.0).limit == ""  # no request was taken with the rows that were refused


def test_for_equal_waits_the_first_rate_is_reported() -> None:
    buckets = Buckets()
    both = charge((REQUESTS, 10), (Rate("rows", 10.0, 1.0), 10))
    assert buckets.take(both, 0.0).limit == ""
    refused = buckets.take(both, 0.0)
    assert (refused.limit, refused.retry_after_s) == ("requests", 1.0)


def test_callers_do_not_see_each_other() -> None:
    buckets = Buckets()
    assert all(buckets.take(charge((REQUESTS, 10), key=f"k{n}"), 0.0).limit == "" for n in range(100))


def test_a_charge_larger_than_the_bucket_needs_a_full_bucket_and_leaves_a_debt() -> None:
    buckets = Buckets()
    large = charge((ROWS, 1000))
    assert buckets.take(large, 0.0).used_s == (10.0,)
    assert buckets.take(large, 1.0).retry_after_s == pytest.approx(9.0)
    assert buckets.take(charge((ROWS, 1)), 1.0).retry_after_s == pytest.approx(7.01)
    assert buckets.take(large, 10.0).limit == ""


def test_a_rate_below_one_per_second_admits_one_request_at_a_time() -> None:
    buckets = Buckets()
    slow = charge((Rate("requests", 0.1, 1.0), 1))
    assert buckets.take(slow, 0.0).limit == ""
    assert buckets.take(slow, 0.0).retry_after_s == pytest.approx(10.0)
    assert buckets.take(slow, 10.0).limit == ""


def test_owed_tokens_are_always_taken_and_the_next_request_waits() -> None:
    buckets = Buckets()
    later = charge((REQUESTS, 1), (TOKENS, 0))
    assert buckets.take(later, 0.0).limit == ""
    assert buckets.take(charge((TOKENS, 5000), is_owed=True), 0.0).limit == ""
    refused = buckets.take(later, 1.0)
    assert refused.limit == "tokens"
    assert refused.retry_after_s == pytest.approx(3.001)
    assert buckets.take(later, 4.01).limit == ""


def test_concurrency_is_limited_and_a_longer_wait_for_a_rate_is_reported_instead() -> None:
    buckets = Buckets()
    assert buckets.take(charge((REQUESTS, 10), max_in_flight=2, in_flight=2), 0.0).limit == ""
    assert buckets.take(charge(max_in_flight=2, in_flight=3), 0.0).limit == CONCURRENCY
    refused = buckets.take(charge((REQUESTS, 9), max_in_flight=2, in_flight=3), 0.0)
    assert refused.limit == "requests"
    assert refused.retry_after_s == pytest.approx(0.9)


def test_each_of_several_gateways_has_its_share_of_the_limits() -> None:
    buckets = Buckets()
    assert [buckets.take(ONE, 0.0, share=2).limit for _ in range(6)] == [""] * 5 + ["requests"]
    assert buckets.take(ONE, 0.0, share=2).retry_after_s == pytest.approx(0.2)
    assert buckets.take(charge(max_in_flight=3, in_flight=2), 0.0, share=2).limit == ""
    assert buckets.take(charge(max_in_flight=3, in_flight=3), 0.0, share=2).limit == CONCURRENCY
    assert buckets.take(charge(max_in_flight=1, in_flight=1), 0.0, share=9).limit == ""


def test_the_shared_stores_answer_is_kept_and_local_takes_are_reported_to_it() -> None:
    buckets = Buckets()
    assert buckets.compute_minimum_use(ONE, 0.0) == (False, (0.0,))
    buckets.set_use(ONE, ChargeResult((1.0,)), 0.0)
    assert buckets.compute_minimum_use(ONE, 0.0) == (False, (1.0,))
    foreseen = buckets.find_certain_refusal(ONE, 0.05)
    assert foreseen is not None
    assert foreseen.retry_after_s == pytest.approx(0.05)
    assert buckets.find_certain_refusal(ONE, 0.1) is None
    assert buckets.take(ONE, 0.2, share=2).limit == ""
    is_ahead, (floor_s,) = buckets.compute_minimum_use(ONE, 0.2)
    assert is_ahead
    assert floor_s == pytest.approx(1.0)
    buckets.set_use(ONE, ChargeResult((0.4,)), 0.2)
    is_ahead, (floor_s,) = buckets.compute_minimum_use(ONE, 0.2)
    assert not is_ahead
    assert floor_s == pytest.approx(0.4)


def test_callers_without_debt_are_forgotten_first_and_their_number_is_bounded() -> None:
    buckets = Buckets(max_keys=100)
    for n in range(1000):
        buckets.take(charge((REQUESTS, 1), key=f"k{n}"), n * 1.0)
    assert len(buckets) <= 3
    for n in range(1000):
        buckets.take(charge((REQUESTS, 10), key=f"j{n}"), 2000.0)
        buckets.take(charge((REQUESTS, 1), key="j0"), 2000.0)
    assert len(buckets) == 100
    assert buckets.take(charge((REQUESTS, 10), key="j999"), 2000.0).limit == "requests"
    assert buckets.take(charge((REQUESTS, 10), key="j1"), 2000.0).limit == "requests"  # from the table of evicted ones


def test_no_refusal_is_certain_while_the_shared_store_lacks_a_charge() -> None:
    buckets = Buckets()
    buckets.take(charge((REQUESTS, 10)), 0.0)
    assert buckets.find_refusal(ONE, 0.0) is not None
    assert buckets.find_certain_refusal(ONE, 0.0) is None
    buckets.set_use(ONE, ChargeResult((1.0,)), 0.0)
    foreseen = buckets.find_certain_refusal(ONE, 0.0)
    assert foreseen is not None
    assert foreseen.limit == "requests"
    unknown = buckets.find_certain_refusal(charge(key="unknown", max_in_flight=1, in_flight=2), 0.0)
    assert unknown is not None
    assert unknown.limit == CONCURRENCY


def test_two_callers_without_debt_are_forgotten_per_new_caller() -> None:
    buckets = Buckets()
    for key in "abc":
        buckets.take(charge((REQUESTS, 1), key=key), 0.0)
    buckets.take(charge((REQUESTS, 1), key="early"), 0.09)
    assert len(buckets) == 4
    buckets.take(charge((REQUESTS, 1), key="d"), 0.1)
    assert len(buckets) == 3
    buckets.take(charge((REQUESTS, 1), key="e"), 0.1)
    assert len(buckets) == 3, "'early' still has a debt"


def test_a_full_table_evicts_the_caller_that_was_unused_for_longest_and_remembers_it() -> None:
    buckets = Buckets(max_keys=2)
    for key, cost in (("a", 5), ("b", 10), ("a", 5), ("c", 10)):
        assert buckets.take(charge((REQUESTS, cost), key=key), 0.0).limit == ""
    assert buckets.find_refusal(charge((REQUESTS, 1), key="a"), 0.0) is not None
    assert len(buckets) == 2
    assert buckets.find_refusal(charge((REQUESTS, 1), key="b"), 0.0) is not None
    assert buckets.find_refusal(charge((REQUESTS, 1), key="b"), 1.0) is None


DAILY = Rate("daily", 5 / 86_400, 86_400, is_total=True)


def test_a_total_that_is_used_up_in_the_shared_store_is_refused_only_while_the_report_is_fresh() -> None:
    buckets, one_of_day = Buckets(), charge((DAILY, 1))
    assert buckets.find_certain_refusal(one_of_day, 10.0) is None
    buckets.set_use(one_of_day, ChargeResult((86_400.0,)), 10.0)
    refused = buckets.find_certain_refusal(one_of_day, 10.9)
    assert refused is not None
    assert refused.limit == "daily"
    assert buckets.find_certain_refusal(one_of_day, 11.0) is None, "another gateway may have given some back"


def test_a_total_is_available_again_when_its_period_ends_and_not_before() -> None:
    buckets = Buckets(ahead_s=86_400.0 * 20_000 + 3600)  # `now` = 0 is one o'clock
    one = charge((DAILY, 1))
    assert [buckets.take(one, n * 10_000.0).limit for n in range(8)] == [""] * 5 + ["daily"] * 3
    refused = buckets.take(one, 70_000.0)
    assert refused.retry_after_s == pytest.approx(86_400 - 3600 - 70_000)
    assert refused.used_s[0] * DAILY.per_s == pytest.approx(5)
    assert [buckets.take(one, 82_801.0).limit for _ in range(6)] == [""] * 5 + ["daily"]


@pytest.mark.parametrize(("limit", "period"), [(1, 1), (3, 7), (7, 86_400), (1000, 86_400), (99_991, 604_800)])
def test_a_total_admits_exactly_its_number_and_gives_back_what_is_undone(limit: int, period: int) -> None:
    rate = Rate("total", limit / period, period, is_total=True)
    buckets, now = Buckets(ahead_s=1.7e9), 12.25
    assert sum(not buckets.take(charge((rate, 1)), now).limit for _ in range(limit + 3)) == limit
    buckets.take(charge((rate, -1), is_owed=True), now)
    assert [buckets.take(charge((rate, 1)), now).limit for _ in range(2)] == ["", "total"]


def test_evicted_totals_are_remembered_and_a_caller_with_much_use_is_dropped_last() -> None:
    buckets, table = Buckets(max_keys=10), EvictedBuckets(rows=64)
    buckets._evicted = table
    for _ in range(5):
        buckets.take(charge((DAILY, 1), key="heavy"), 0.0)
    for n in range(10_000):
        buckets.take(charge((DAILY, 1), key=f"s{n}"), 0.0)
    assert len(buckets) == 10
    assert buckets.take(charge((DAILY, 1), key="heavy"), 0.0).limit == "daily"


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 7), st.integers(0, 30)), max_size=60),
    burst_s=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    share=st.integers(1, 3),
)
def test_no_window_has_more_than_its_rate_and_one_burst(
    steps: list[tuple[float, int, int]], burst_s: float, share: int
) -> None:
    """Beyond the burst, at most one charge goes into debt, for any times and sizes."""
    rates = Rate("requests", 7.0, burst_s), Rate("rows", 20.0, burst_s)
    buckets, now = Buckets(), 0.0
    passed: list[tuple[float, tuple[float, ...]]] = []
    for pause, *costs in steps:
        now += pause
        asked = charge(*zip(rates, costs, strict=True))
        before = buckets.compute_minimum_use(asked, now)
        taken = buckets.take(asked, now, share)
        if taken.limit:
            assert taken.retry_after_s > 0
            assert buckets.compute_minimum_use(asked, now) == before
        else:
            passed.append((now, tuple(costs)))
    for index, rate in enumerate(rates):
        for first in range(len(passed)):
            sums = [costs[index] for _, costs in passed[first:]]
            span = now - passed[first][0]
            assert sum(sums) <= (span + burst_s) * rate.per_s / share + max(sums, default=0) + 1e-6
