"""Decides whether and when a failed call is tried again. No I/O."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidRequest, PenstockError

if TYPE_CHECKING:
    from random import Random

EARNED = 0.1  # retries that each successful call adds to the budget


@dataclass(frozen=True, slots=True)
class Retries:
    """The rules by which a client repeats failed calls, within their deadlines.

    A call is repeated if its error is retryable and nothing has run on the server. The pauses are random, and they
    grow up to `max_s`. A pause is at least as long as the server requests; if the server requests more than `max_s`,
    the error is raised at once. `budget` limits the retries of all calls of a client together: each retry costs 1, and
    ten successful calls earn 1.
    """

    attempts: int = 5  # for one call, including the first; 1: no retries
    first_s: float = 0.1  # upper bound of the first pause; it doubles for each further pause
    max_s: float = 5.0
    budget: int = 20

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_s <= 0 or self.max_s < self.first_s or self.budget < 0:
            raise InvalidRequest("Retries needs attempts >= 1, 0 < first_s <= max_s and budget >= 0")


class RetryBudget:
    """The retries that a client may still make, so that retries do not multiply an overload."""

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries
        self._retries_left = float(max_retries)

    def earn(self) -> None:
        if self._retries_left < self._max_retries:
            self._retries_left = min(self._max_retries, self._retries_left + EARNED)

    def take(self) -> bool:
        if self._retries_left < 1:
            return False
        self._retries_left -= 1
        return True


class Attempts:
    """Counts the attempts of one call, and decides whether to make another attempt."""

    def __init__(self, retries: Retries, rng: "Random", budget: RetryBudget | None, *, is_repeatable: bool) -> None:
        """Start counting the attempts of a call.

        If `budget` is None, only the deadline limits the attempts. `is_repeatable`: the call may safely run twice.
        """
        self._retries = retries
        self._rng = rng
        self._budget = budget
        self._is_repeatable = is_repeatable
        self._count = 0

    def pause_s(self, error: PenstockError, left_s: float) -> float | None:
        """Return the pause before the next attempt; None: do not try again."""
        self._count += 1
        retries = self._retries
        is_last = self._budget is not None and self._count >= retries.attempts
        if is_last or retries.attempts == 1 or not error.is_retryable:
            return None
        if not error.is_definite and not self._is_repeatable:
            return None
        hint_s = float(getattr(error, "retry_after_s", 0.0))
        if hint_s > retries.max_s:
            return None
        grown_s = min(retries.max_s, retries.first_s * 2 ** min(self._count - 1, 30))
        pause_s = hint_s + self._rng.uniform(0.0, grown_s)
        if pause_s >= left_s or (self._budget is not None and not self._budget.take()):
            return None
        return pause_s
