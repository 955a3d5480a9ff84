"""Limits of callers: what a request takes, which requests count as one caller's, and what a refusal says."""

import pytest

from penstock.core.principals import ANYBODY, NOBODY, KeyLimits, Principal
from penstock.features.limits import limits as access
from penstock.features.limits.limits import (
    RequestsInFlight,
    identify_caller,
    list_rates,
    make_refusal,
    make_request_charge,
    make_token_charge,
)
from penstock.storage.limits.limit_store import Charge, ChargeResult, Rate, Spend

LIMITS = KeyLimits(requests_per_s=10, rows_per_s=200, tokens_per_s=1000, burst_s=2.0, concurrency=4)
KEY = Principal("batch", "k-1", limits=LIMITS)


def test_a_request_takes_one_request_and_its_rows_and_needs_tokens_left() -> None:
    charge = make_request_charge("key:k-1", LIMITS, 32, 3)
    assert [(spend.rate.name, spend.rate.per_s, spend.rate.burst_s, spend.cost) for spend in charge.spends] == [
        ("requests", 10, 2.0, 1),
        ("rows", 200, 2.0, 32),
        ("tokens", 1000, 2.0, 0),
    ]
    assert (charge.max_in_flight, charge.in_flight, charge.is_owed) == (4, 3, False)
    assert make_token_charge("key:k-1", LIMITS, 700) == Charge(
        "key:k-1", (Spend(Rate("tokens", 1000, 2.0), 700),), is_owed=True
    )


def test_only_limited_rates_are_charged() -> None:
    assert list_rates(KeyLimits(rows_per_s=5)) == (Rate("rows", 5, 1.0),)
    assert list_rates(KeyLimits(concurrency=1)) == ()
    assert access.is_limited(KeyLimits(concurrency=1))
    assert access.is_limited(KeyLimits(rows_per_s=5))
    assert not access.is_limited(KeyLimits())
    assert not access.is_limited(KeyLimits(requests_per_s=float("inf")))


def test_a_key_is_one_caller_and_anonymous_callers_are_told_apart_by_address() -> None:
    assert identify_caller(KEY, "10.0.0.1") == identify_caller(KEY, "10.0.0.2") == "key:k-1"
    assert identify_caller(ANYBODY, "10.0.0.1") == identify_caller(NOBODY, "10.0.0.1") == "address:10.0.0.1"
    assert (
        identify_caller(Principal("cert"), "10.0.0.1") == identify_caller(Principal("cert"), "10.0.0.2") == "name:cert"
    )


def test_statuses_report_quota_remaining_and_reset_of_each_limit() -> None:
    charge = make_request_charge("key:k-1", LIMITS, 32, 3)
    requests, rows, tokens, slots = access.make_limit_statuses(charge, ChargeResult((0.5, 2.0, 7.5)))
    assert (requests.name, requests.quota, requests.window_s, requests.remaining, requests.reset_s) == (
        "requests",
        20,
        2,
        15,
        0.5,
    )
    assert (rows.quota, rows.remaining, rows.reset_s) == (400, 0, 2.0)
    assert (tokens.quota, tokens.remaining, tokens.reset_s) == (2000, 0, 7.5)
    assert (slots.name, slots.quota, slots.window_s, slots.remaining, slots.reset_s) == ("concurrency", 4, 0, 1, 0)
    full = make_request_charge("key:k-1", LIMITS, 32, 5)
    assert access.make_limit_statuses(full, ChargeResult((0.0, 0.0, 0.0)))[-1].remaining == 0


@pytest.mark.parametrize(
    ("per_s", "burst_s", "quota", "window_s"), [(0.1, 1.0, 1, 10), (100, 0.5, 100, 1), (3, 2.5, 9, 3), (0.7, 1.0, 1, 2)]
)
def test_quota_and_window_are_whole_numbers(per_s: float, burst_s: float, quota: int, window_s: int) -> None:
    limits = KeyLimits(requests_per_s=per_s, burst_s=burst_s)
    (told,) = access.make_limit_statuses(make_request_charge("k", limits, 1, 0), ChargeResult((0.0,)))
    assert (told.quota, told.window_s) == (quota, window_s)


def test_a_refusal_names_the_limit_and_the_time_to_wait() -> None:
    charge = make_request_charge("key:k-1", LIMITS, 32, 3)
    error = make_refusal(KEY, LIMITS, charge, ChargeResult((0.5, 2.0, 0.0), "rows", 0.16))
    assert error.fields["limit"] == "rows"
    assert error.retry_after_s == pytest.approx(0.16)
    assert str(error) == "the key 'batch' has used its limit of 200 rows per second: try again in 0.16 s"
    assert [each.name for each in error.limit_statuses] == ["requests", "rows", "tokens", "concurrency"]
    error = make_refusal(ANYBODY, LIMITS, charge, ChargeResult((0.5, 2.0, 0.0), "concurrency", 0.1))
    assert str(error).startswith("your address has 4 requests in flight")
    assert error.is_retryable


def test_held_requests_are_counted_by_caller_and_forgotten_when_all_have_ended() -> None:
    held = RequestsInFlight()
    assert [held.take("a", LIMITS), held.take("a", LIMITS), held.take("b", LIMITS)] == [1, 2, 1]
    assert (held.count("a"), held.count("b")) == (2, 1)
    assert {(charge.key, charge.max_in_flight, charge.in_flight, charge.is_owed) for charge in held.list_charges()} == {
        ("a", 4, 2, True),
        ("b", 4, 1, True),
    }
    assert [held.release("a", LIMITS), held.release("b", LIMITS), held.release("a", LIMITS)] == [1, 0, 0]
    assert (held.count("a"), held.count("b")) == (0, 0)
    assert held.list_charges() == []
