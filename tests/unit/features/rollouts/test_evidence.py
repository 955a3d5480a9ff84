"""Evidence against a new block, by reports of gateways: how many errors and slow or waiting requests are a fault."""

from math import inf, log

import pytest

from penstock.core.cluster.answer_counts import AnswerCounts, find_bucket
from penstock.features.rollouts.evidence import (
    DOUBT,
    Evidence,
    Sample,
    Tolerance,
    compute_upper_share,
    is_beyond_chance,
)

TOLERANCE = Tolerance(error_rate=0.02, slowdown=2.0)
FAST, SLOW = find_bucket(0.01), find_bucket(0.1)
FAILED, REFUSED = "engine_failed", "invalid_request"


def answers(block: str, count: int, bucket: int = FAST, is_control: bool = False) -> AnswerCounts:
    return AnswerCounts(block, count, {}, {bucket: count}, is_control=is_control)


def errors(block: str, count: int, code: str = FAILED, is_control: bool = False) -> AnswerCounts:
    return AnswerCounts(block, 0, {code: count}, is_control=is_control)


def compared(*counts: AnswerCounts) -> list[AnswerCounts]:
    """Return counts of requests that all came while both blocks were in service."""
    control = [
        AnswerCounts(each.block_id, each.answers, each.errors, each.latencies, is_control=True) for each in counts
    ]
    return [*counts, *control]


def seen(*counts: AnswerCounts, now: float = 0.0, share: float = 0.5) -> Evidence:
    evidence = Evidence("old", "new")
    evidence.begin_step(share, now)
    evidence.add("g", counts, now)
    return evidence


# --- errors


def test_five_errors_are_a_fault_beside_a_hundred_good_answers() -> None:
    def fault(count: int, sure: float) -> str:
        return seen(*compared(answers("old", 100), errors("new", count))).find_error_fault(TOLERANCE, 0.0, sure)

    assert fault(5, 14.0).startswith("5 of 5 requests to the new block failed (100%), 0 of 100 to the old block")
    assert fault(4, 14.0) == ""
    assert fault(5, DOUBT)
    assert fault(4, DOUBT) == "", "fewer than five errors are never judged"


@pytest.mark.parametrize(("failed", "is_in_doubt"), [(12, False), (13, True)])
def test_a_block_is_in_doubt_if_chance_explains_its_errors_in_one_of_twenty_cases(
    failed: int, is_in_doubt: bool
) -> None:
    new = AnswerCounts("new", 100 - failed, {FAILED: failed}, {FAST: 100 - failed})
    evidence = seen(*compared(answers("old", 100), new))
    assert bool(evidence.find_error_fault(TOLERANCE, 0.0, DOUBT)) == is_in_doubt
    assert evidence.find_error_fault(TOLERANCE, 0.0) == ""


def test_without_answers_of_the_old_block_half_of_the_requests_may_fail() -> None:
    assert seen(errors("new", 22)).find_fault(TOLERANCE, 0.0)
    assert not seen(errors("new", 21)).find_fault(TOLERANCE, 0.0)


def test_errors_that_callers_caused_count_less_if_callers_stick_to_blocks() -> None:
    sticky = Tolerance(0.02, 2.0, is_sticky=True)
    for tolerance, count in ((TOLERANCE, 5), (sticky, 23)):
        for bad, is_fault in ((count, True), (count - 1, False)):
            evidence = seen(*compared(answers("old", 100), errors("new", bad, REFUSED)))
            assert bool(evidence.find_fault(tolerance, 0.0)) is is_fault
    assert seen(*compared(answers("old", 100), errors("new", 5))).find_fault(sticky, 0.0)


def test_an_old_block_that_fails_as_often_excuses_the_new_one() -> None:
    for code in (FAILED, REFUSED):
        evidence = seen(*compared(answers("old", 50), errors("old", 50, code), errors("new", 10, code)))
        assert not evidence.find_fault(TOLERANCE, 0.0)


@pytest.mark.parametrize(("old", "new", "is_compared"), [(30, 40, True), (29, 40, False), (30, 41, False)])
def test_requests_of_the_same_moments_are_compared_if_there_are_enough(old: int, new: int, is_compared: bool) -> None:
    """Ten errors are a fault beside answers of the same moments, and none beside errors of other moments."""
    evidence = seen(
        errors("old", 100),
        answers("old", old, is_control=True),
        errors("new", 10, is_control=True),
        errors("new", 10),
        answers("new", new - 10),
    )
    assert evidence.find_fault(TOLERANCE, 0.0).startswith("10 of 10 requests to the new block") is is_compared


# --- latency


def test_twenty_slow_answers_are_a_fault_beside_thirty_fast_ones() -> None:
    def fault(old: int, new: int) -> str:
        return seen(*compared(answers("old", old), answers("new", new, SLOW))).find_fault(TOLERANCE, 0.0)

    assert fault(30, 20).startswith("the new block's p50 is 94.3 ms over 20 requests, the old block's")
    assert fault(30, 19) == ""
    assert fault(29, 20) == ""


def test_slow_answers_are_no_fault_if_latency_does_not_matter() -> None:
    evidence = seen(*compared(answers("old", 100), answers("new", 100, SLOW)))
    assert evidence.find_fault(TOLERANCE, 0.0)
    assert evidence.find_fault(Tolerance(0.02, slowdown=0.0), 0.0) == ""
    assert evidence.find_error_fault(TOLERANCE, 0.0) == ""


def test_more_than_a_twentieth_of_slow_answers_is_a_fault_of_the_p95() -> None:
    for slow, fault in ((101, "the new block's p95 is"), (100, "")):
        counts = compared(answers("old", 1000), answers("new", 2000 - slow), answers("new", slow, SLOW))
        assert seen(*counts).find_fault(TOLERANCE, 0.0)[: len("the new block's p95 is")] == fault


def test_a_difference_of_a_millisecond_is_no_fault() -> None:
    fastest, fast = find_bucket(0.0001), find_bucket(0.001)
    assert seen(*compared(answers("old", 100, fastest), answers("new", 100, fast))).find_fault(TOLERANCE, 0.0) == ""


def test_latencies_of_other_moments_must_be_exceeded_by_more_and_for_longer() -> None:
    for seconds, now, sure, is_fault in (
        (0.04, 10.0, 14.0, True),
        (0.04, 9.9, 14.0, False),
        (0.04, 0.0, DOUBT, True),
        (0.025, 10.0, 14.0, False),
    ):
        evidence = seen(answers("old", 30), answers("new", 20, find_bucket(seconds)))
        assert evidence.find_fault(TOLERANCE, now, sure).startswith("the new block's p50") is is_fault
    some_slow = seen(answers("old", 1000), answers("new", 80), answers("new", 20, SLOW))
    assert some_slow.find_fault(TOLERANCE, 10.0) == "", "only the median is compared with earlier answers"
    assert seen(answers("old", 29), answers("new", 20, SLOW)).find_fault(TOLERANCE, 10.0) == ""


# --- waiting requests


def waiting(new: int, age_s: float, old: int = 0, usual_s: float = 0.01) -> list[AnswerCounts]:
    ages = {block: {find_bucket(age_s): count} for block, count in (("old", old), ("new", new))}
    before = answers("old", 100, find_bucket(usual_s))
    return [
        AnswerCounts("old", before.answers, {}, before.latencies, ages["old"]),
        AnswerCounts("new", waiting=ages["new"]),
    ]


@pytest.mark.parametrize(
    ("new", "old", "age_s", "usual_s", "share", "is_fault"),
    [
        (28, 0, 2.0, 0.01, 0.5, True),
        (27, 0, 2.0, 0.01, 0.5, False),
        (20, 0, 2.0, 0.01, 0.1, True),
        (19, 0, 2.0, 0.01, 0.1, False),
        (60, 40, 2.0, 0.01, 0.5, False),
        (20, 0, 1.5, 0.01, 0.1, True),
        (20, 0, 1.0, 0.01, 0.1, False),
        (20, 0, 0.9, 0.01, 0.1, False),
        (20, 0, 4.0, 1.0, 0.1, True),
        (20, 0, 2.5, 1.0, 0.1, False),
    ],
)
def test_the_new_block_may_have_its_share_of_overdue_requests(
    new: int, old: int, age_s: float, usual_s: float, share: float, is_fault: bool
) -> None:
    evidence = seen(*waiting(new, age_s, old, usual_s), share=share)
    fault = evidence.find_fault(TOLERANCE, 0.0)
    assert fault.startswith(f"{new} requests to the new block have waited longer than ") is is_fault
    assert not is_fault or fault.endswith(f", {old} to the old block")


def test_waiting_requests_of_all_gateways_count_until_a_gateway_leaves() -> None:
    evidence = seen(*waiting(10, 2.0), share=0.1)
    assert evidence.find_fault(TOLERANCE, 0.0) == ""
    evidence.add("other", waiting(10, 2.0), 0.0)
    assert evidence.find_fault(TOLERANCE, 0.0)
    evidence.gateway_left("other")
    assert evidence.find_fault(TOLERANCE, 0.0) == ""
    evidence.add("g", waiting(20, 2.0), 0.0)
    assert evidence.find_fault(TOLERANCE, 0.0)
    evidence.add("g", [], 0.0)
    assert evidence.find_fault(TOLERANCE, 0.0) == "", "a report replaces the gateway's previous one"


def test_waiting_requests_are_no_fault_before_the_old_block_has_answered() -> None:
    assert seen(AnswerCounts("new", waiting={SLOW: 50, find_bucket(9.0): 50})).find_fault(TOLERANCE, 0.0) == ""


# --- time


BAD, GOOD = compared(answers("old", 100), errors("new", 20)), compared(answers("old", 100), answers("new", 10_000))


@pytest.mark.parametrize(
    ("bad_at", "now", "is_fault"),
    [
        (5.0, 7.0, True),
        (5.0, 7.01, False),
        (9.0, 19.0, True),
        (9.0, 19.01, False),
        (0.25, 2.25, True),
        (0.2, 2.1, False),
    ],
)
def test_errors_after_many_good_answers_are_seen_in_the_last_two_and_ten_seconds(
    bad_at: float, now: float, is_fault: bool
) -> None:
    evidence = seen(*GOOD)
    evidence.add("g", BAD, bad_at)
    assert bool(evidence.find_fault(TOLERANCE, now)) is is_fault


def test_requests_of_the_same_moments_are_compared_within_a_span() -> None:
    evidence = seen(errors("old", 1000), *compared(answers("new", 10_000)))
    evidence.add("g", compared(answers("old", 40), errors("new", 20)), 5.0)
    assert evidence.find_fault(TOLERANCE, 5.0).startswith("20 of 20 requests to the new block")


def test_before_its_first_step_the_new_block_has_no_share_and_is_judged_at_once() -> None:
    evidence = Evidence("old", "new")
    evidence.add("g", waiting(20, 2.0), 0.0)
    assert "have waited longer" in evidence.find_fault(TOLERANCE, 0.0)
    evidence = Evidence("old", "new")
    evidence.add("g", [answers("old", 30), answers("new", 20, SLOW)], 0.0)
    assert evidence.find_fault(TOLERANCE, 0.0).startswith("the new block's p50")


def test_reports_are_kept_for_ten_seconds() -> None:
    evidence = seen(*GOOD, now=-0.5)
    evidence.add("g", BAD, 0.0)
    evidence.add("g", [], 10.0)
    assert evidence.find_fault(TOLERANCE, 10.0)
    evidence.add("g", [], 10.3)
    assert len(evidence._slices) == 2


def test_a_new_step_begins_without_the_reports_before_it() -> None:
    evidence = seen(*BAD)
    assert evidence.step_answers == 20
    evidence.begin_step(0.5, 1.0)
    assert evidence.step_answers == 0
    assert evidence.find_fault(TOLERANCE, 1.0) == ""
    assert (evidence.old.answers, evidence.new.errors) == (100, 20)


# --- counts


def test_outcomes_are_counted_by_gateway_and_without_other_blocks() -> None:
    evidence = Evidence("old", "new")
    assert (evidence.gateways, evidence.most_outcomes) == (1, 0)
    evidence.begin_step(0.5, 0.0)
    evidence.add("a", compared(answers("new", 5), errors("new", 2), answers("old", 9), answers("other", 50)), 0.0)
    evidence.add("b", [answers("new", 3)], 0.0)
    evidence.add("c", [], 0.0)
    assert (evidence.gateways, evidence.most_outcomes, evidence.step_answers) == (3, 7, 10)
    assert (evidence.old.outcomes, evidence.new.outcomes) == (9, 10)
    evidence.gateway_left("a")
    assert (evidence.gateways, evidence.most_outcomes) == (2, 3)


def test_a_sample_counts_errors_that_callers_caused_apart() -> None:
    sample = Sample()
    sample.add(AnswerCounts("new", 4, {FAILED: 2, REFUSED: 1}, {3: 1, 5: 4}))
    sample.merge(Sample(1, 1, 1, {5: 1}))
    assert sample == Sample(answers=5, errors=3, refused=2, latencies={3: 1, 5: 5})
    assert (sample.outcomes, sample.ran, sample.count_slower_than(3), sample.count_slower_than(5)) == (10, 6, 5, 0)


def test_the_highest_likely_share_follows_wilson() -> None:
    assert compute_upper_share(0, 0) == 1.0
    assert compute_upper_share(1, 100) == pytest.approx(0.055974, abs=1e-6)
    assert compute_upper_share(100, 100) == pytest.approx(1.0)


def test_a_share_is_beyond_the_usual_one_only_if_chance_is_unlikely() -> None:
    assert is_beyond_chance(10, 10, 0.1)
    assert not is_beyond_chance(1, 10, 0.1)
    assert not is_beyond_chance(0, 10, 0.0)
    assert not is_beyond_chance(10, 10, 1.0)
    assert not is_beyond_chance(10, 10, 1.5)
    assert not is_beyond_chance(30, 100, 0.25)
    assert not is_beyond_chance(30, 100, 0.2, sure=3)
    assert is_beyond_chance(300, 1000, 0.2, sure=3)
    assert not is_beyond_chance(300, 1000, 0.2, sure=inf)
    assert not is_beyond_chance(1, 1, 0.5, sure=log(2))
