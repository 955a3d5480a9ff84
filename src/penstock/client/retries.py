"""Whether a call that failed is tried again, and when. Decides; never waits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidRequest, PenstockError

if TYPE_CHECKING:
    from random import Random

EARNED = 0.1  # of a further attempt, by each call that is answered


@dataclass(frozen=True, slots=True)
class Retries:
    """What failed for certain, and may succeed later, is tried again until the call's deadline.

    Pauses grow and are random, and no shorter than the server asks for; where it asks for more than `max_s`, the
    caller hears of it at once. `budget` bounds further attempts of all calls of a client together: each costs one,
    and ten answers earn one.
    """

    attempts: int = 5  # of one call, the first among them; 1: never again
    first_s: float = 0.1  # the first pause is at most so long, the next twice that, and so on
    max_s: float = 5.0
    budget: int = 20

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_s <= 0 or self.max_s < self.first_s or self.budget < 0:
            raise InvalidRequest("retries have at least one attempt, and pauses from first_s > 0 to max_s")


class RetryBudget:
    """What is left of a client's further attempts, so that an overload is not multiplied by them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = float(most)

    def earn(self) -> None:
        if self._left < self._most:
            self._left = min(self._most, self._left + EARNED)

    def take(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Attempts:
    """Of one call."""

    def __init__(self, retries: Retries, rng: "Random", budget: RetryBudget | None, *, is_repeatable: bool) -> None:
        """Without a budget the deadline alone ends them; `is_repeatable`: running twice does no harm."""
        self._retries = retries
        self._rng = rng
        self._budget = budget
        self._is_repeatable = is_repeatable
        self._made = 0

    def pause_s(self, error: PenstockError, left_s: float) -> float | None:
        """Until the next one; None: there is none."""
        self._made += 1
        retries = self._retries
        is_last = self._budget is not None and self._made >= retries.attempts
        if is_last or retries.attempts == 1 or not error.is_retryable:
            return None
        if not error.is_definite and not self._is_repeatable:
            return None
        hint_s = float(getattr(error, "retry_after_s", 0.0))
        if hint_s > retries.max_s:
            return None
        grown_s = min(retries.max_s, retries.first_s * 2 ** min(self._made - 1, 30))
        pause_s = hint_s + self._rng.uniform(0.0, grown_s)
        if pause_s >= left_s or (self._budget is not None and not self._budget.take()):
            return None
        return pause_s
