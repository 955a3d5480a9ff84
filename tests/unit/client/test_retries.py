"""Decisions to retry a call, by errors, deadlines and budgets alone."""

from random import Random

import pytest

from penstock.client.retries import Attempts, Retries, RetryBudget
from penstock.core.errors import InvalidRequest, InvalidTensor, PenstockError, QueueFull, RateLimited, WorkerLost


def attempts(
    retries: Retries | None = None, budget: RetryBudget | None = None, is_repeatable: bool = False
) -> Attempts:
    return Attempts(retries or Retries(), Random(7), budget or RetryBudget(20), is_repeatable=is_repeatable)


def hinted(seconds: float) -> PenstockError:
    return RateLimited("later", retry_after_s=str(seconds))


def test_pauses_grow_and_are_random() -> None:
    pauses: list[list[float]] = []
    rng = Random(7)
    for _ in range(200):
        made = Attempts(Retries(attempts=4, first_s=0.1, max_s=0.3), rng, RetryBudget(3), is_repeatable=False)
        each = [made.pause_s(hinted(0), 60) for _ in range(4)]
        assert each[3] is None
        pauses.append([pause for pause in each if pause is not None])
    for row, most in zip(zip(*pauses, strict=True), (0.1, 0.2, 0.3), strict=True):
        assert 0 <= min(row) < 0.2 * most
        assert 0.8 * most < max(row) <= most


def test_a_servers_retry_hint_is_the_minimum_pause() -> None:
    assert 2.0 <= (attempts().pause_s(hinted(2.0), 60) or 0) <= 2.1


def test_a_hint_beyond_the_retry_limit_or_deadline_is_raised() -> None:
    assert attempts().pause_s(hinted(5.1), 60) is None
    assert attempts().pause_s(hinted(2.0), 2.0) is None


@pytest.mark.parametrize(
    ("error", "is_repeatable", "is_tried"),
    [
        (QueueFull("full"), False, True),
        (InvalidTensor("wrong"), True, False),
        (WorkerLost("gone"), False, False),
        (WorkerLost("gone"), True, True),
    ],
)
def test_a_request_that_may_have_run_is_repeated_only_if_that_is_harmless(
    error: PenstockError, is_repeatable: bool, is_tried: bool
) -> None:
    assert (attempts(is_repeatable=is_repeatable).pause_s(error, 60) is not None) == is_tried


def test_one_attempt_means_no_retry() -> None:
    assert attempts(Retries(attempts=1)).pause_s(hinted(0), 60) is None
    assert Attempts(Retries(attempts=1), Random(7), None, is_repeatable=True).pause_s(hinted(0), 60) is None


def test_a_budget_is_shared_and_earned_by_answers() -> None:
    budget = RetryBudget(2)
    assert [attempts(budget=budget).pause_s(hinted(0), 60) is not None for _ in range(3)] == [True, True, False]
    for _ in range(11):
        budget.earn()
    assert [budget.take(), budget.take()] == [True, False]
    for _ in range(100):
        budget.earn()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_without_a_budget_only_the_deadline_ends_retries() -> None:
    patient = Attempts(Retries(attempts=2), Random(7), None, is_repeatable=True)
    assert all(patient.pause_s(hinted(0), 60) is not None for _ in range(100))
    assert patient.pause_s(hinted(0), 0) is None


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        Retries(attempts=0)
