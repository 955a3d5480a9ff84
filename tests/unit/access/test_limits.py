"""What a request takes of its caller's limits, who counts as one caller, and what a refusal tells."""

import pytest

from penstock.access import limits as access
from penstock.access.limits import Held, caller_of, owed_of, rates_of, refusal, request_of
from penstock.core.principals import ANYBODY, NOBODY, KeyLimits, Principal
from penstock.storage.limits.base import Ask, Rate, Spend, Taken

LIMITS = KeyLimits(requests_per_s=10, rows_per_s=200, tokens_per_s=1000, burst_s=2.0, concurrency=4)
KEY = Principal("batch", "k-1", limits=LIMITS)


def test_a_request_takes_itself_and_its_rows_and_waits_for_tokens() -> None:
    ask = request_of("key:k-1", LIMITS, 32, 3)
    assert [(spend.rate.name, spend.rate.per_s, spend.rate.burst_s, spend.cost) for spend in ask.spends] == [
        ("requests", 10, 2.0, 1),
        ("rows", 200, 2.0, 32),
        ("tokens", 1000, 2.0, 0),
    ]
    assert (ask.slots, ask.held, ask.is_owed) == (4, 3, False)
    assert owed_of("key:k-1", LIMITS, 700) == Ask("key:k-1", (Spend(Rate("tokens", 1000, 2.0), 700),), is_owed=True)


def test_what_is_not_limited_is_not_asked() -> None:
    assert rates_of(KeyLimits(rows_per_s=5)) == (Rate("rows", 5, 1.0),)
    assert rates_of(KeyLimits(concurrency=1)) == ()
    assert access.is_limited(KeyLimits(concurrency=1))
    assert access.is_limited(KeyLimits(rows_per_s=5))
    assert not access.is_limited(KeyLimits())
    assert not access.is_limited(KeyLimits(requests_per_s=float("inf")))


def test_a_key_counts_as_one_wherever_it_comes_from_and_who_shows_none_by_address() -> None:
    assert caller_of(KEY, "10.0.0.1") == caller_of(KEY, "10.0.0.2")
    assert caller_of(ANYBODY, "10.0.0.1") == caller_of(NOBODY, "10.0.0.1") != caller_of(ANYBODY, "10.0.0.2")
    assert caller_of(Principal("cert"), "10.0.0.1") == caller_of(Principal("cert"), "10.0.0.2")


def test_a_caller_hears_how_it_stands_with_each_limit() -> None:
    ask = request_of("key:k-1", LIMITS, 32, 3)
    requests, rows, tokens, slots = access.standings(ask, Taken((0.5, 2.0, 7.5)))
    assert (requests.name, requests.quota, requests.window_s, requests.remaining, requests.reset_s) == (
        "requests",
        20,
        2,
        15,
        0.5,
    )
    assert (rows.quota, rows.remaining, rows.reset_s) == (400, 0, 2.0)
    assert (tokens.quota, tokens.remaining, tokens.reset_s) == (2000, 0, 7.5)
    assert (slots.name, slots.quota, slots.window_s, slots.remaining) == ("concurrency", 4, 0, 1)


@pytest.mark.parametrize(
    ("per_s", "burst_s", "quota", "window_s"), [(0.1, 1.0, 1, 10), (100, 0.5, 100, 1), (3, 2.5, 9, 3), (0.7, 1.0, 1, 2)]
)
def test_a_policy_is_told_in_whole_numbers(per_s: float, burst_s: float, quota: int, window_s: int) -> None:
    limits = KeyLimits(requests_per_s=per_s, burst_s=burst_s)
    (told,) = access.standings(request_of("k", limits, 1, 0), Taken((0.0,)))
    assert (told.quota, told.window_s) == (quota, window_s)


def test_a_refusal_names_the_limit_and_says_when_to_come_back() -> None:
    ask = request_of("key:k-1", LIMITS, 32, 3)
    error = refusal(KEY, LIMITS, ask, Taken((0.5, 2.0, 0.0), "rows", 0.16))
    assert error.fields["limit"] == "rows"
    assert error.retry_after_s == pytest.approx(0.16)
    assert str(error) == "the key 'batch' may ask for 200 rows a second, and has had them: come back in 0.16 s"
    assert [each.name for each in error.standings] == ["requests", "rows", "tokens", "concurrency"]
    error = refusal(ANYBODY, LIMITS, ask, Taken((0.5, 2.0, 0.0), "concurrency", 0.1))
    assert str(error).startswith("4 requests of your address are inside")
    assert error.is_retryable


def test_those_inside_are_counted_by_caller_and_forgotten_when_all_have_left() -> None:
    held = Held()
    assert [held.take("a", LIMITS), held.take("a", LIMITS), held.take("b", LIMITS)] == [1, 2, 1]
    assert {(ask.key, ask.slots, ask.held, ask.is_owed) for ask in held.asks()} == {
        ("a", 4, 2, True),
        ("b", 4, 1, True),
    }
    assert [held.release("a", LIMITS), held.release("b", LIMITS), held.release("a", LIMITS)] == [1, 0, 0]
    assert held.asks() == []
