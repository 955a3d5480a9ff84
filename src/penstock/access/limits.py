"""What callers may ask for in a second and at once: what a request takes of their limits, and what they are told.

Rates are named, so whatever is counted (requests, rows, tokens) is one more name: all of an ask is taken, or none.
Decides; what was taken is kept in storage/limits.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, inf

from penstock.core.errors import RateLimited
from penstock.core.principals import ANYBODY, NOBODY, KeyLimits, LimitStanding, Principal
from penstock.storage.limits.base import CONCURRENCY, Ask, Rate, Spend, Taken

REQUESTS, ROWS, TOKENS = "requests", "rows", "tokens"


@lru_cache(4096)
def rates_of(limits: KeyLimits) -> tuple[Rate, ...]:
    """Those that are limited."""
    named = (REQUESTS, limits.requests_per_s), (ROWS, limits.rows_per_s), (TOKENS, limits.tokens_per_s)
    return tuple(Rate(name, per_s, limits.burst_s) for name, per_s in named if 0 < per_s < inf)


def is_limited(limits: KeyLimits) -> bool:
    return bool(limits.concurrency or rates_of(limits))


def request_of(caller: str, limits: KeyLimits, rows: int, held: int) -> Ask:
    """What a request takes when it comes; its tokens are counted when it is answered, and something must be left."""
    costs = {REQUESTS: 1, ROWS: rows, TOKENS: 0}
    spends = tuple([Spend(rate, costs[rate.name]) for rate in rates_of(limits)])
    return Ask(caller, spends, limits.concurrency, held)


def owed_of(caller: str, limits: KeyLimits, tokens: int) -> Ask:
    """What an answer has cost, which may be more than is left: then the next request waits."""
    spends = tuple([Spend(rate, tokens) for rate in rates_of(limits) if rate.name == TOKENS])
    return Ask(caller, spends, is_owed=True)


def slots_of(caller: str, limits: KeyLimits, held: int) -> Ask:
    """Tells how many requests are inside now."""
    return Ask(caller, (), limits.concurrency, held, is_owed=True)


def standings(ask: Ask, taken: Taken) -> tuple[LimitStanding, ...]:
    return tuple(_standings(ask, taken))


def _standings(ask: Ask, taken: Taken) -> Iterator[LimitStanding]:
    for (rate, _), used_s in zip(ask.spends, taken.used_s, strict=True):
        window_s = ceil(max(rate.burst_s, 1 / rate.per_s))
        left = max(0, int((rate.burst_s - used_s) * rate.per_s + 1e-6))
        yield LimitStanding(rate.name, int(rate.per_s * window_s + 1e-6), window_s, left, used_s)
    if ask.slots:
        yield LimitStanding(CONCURRENCY, ask.slots, 0, max(0, ask.slots - ask.held), 0.0)


def refusal(principal: Principal, limits: KeyLimits, ask: Ask, taken: Taken) -> RateLimited:
    who = "your address" if is_anonymous(principal) else f"the key '{principal.name}'"
    if taken.limit == CONCURRENCY:
        why = f"{limits.concurrency} requests of {who} are inside, as many as may be at once: wait for one to end"
    else:
        rate = next(rate for rate in rates_of(limits) if rate.name == taken.limit)
        why = (
            f"{who} may ask for {rate.per_s:g} {rate.name} a second, and has had them: come back in "
            f"{taken.retry_after_s:.3g} s"
        )
    error = RateLimited(why, limit=taken.limit, retry_after_s=f"{taken.retry_after_s:.6f}")
    error.standings = standings(ask, taken)
    return error


def is_anonymous(principal: Principal) -> bool:
    return principal is ANYBODY or principal is NOBODY


def caller_of(principal: Principal, client: str) -> str:
    """Who shares one count: a key, however often it was rotated; who shows none, with its address."""
    if principal.key_id:
        return f"key:{principal.key_id}"
    return f"address:{client}" if is_anonymous(principal) else f"name:{principal.name}"


class Held:
    """How many requests of each caller are inside here."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, KeyLimits]] = {}

    def take(self, caller: str, limits: KeyLimits) -> int:
        """Returns how many there are with this one; `release` must follow."""
        count = self._counts.get(caller, (0, limits))[0] + 1
        self._counts[caller] = count, limits
        return count

    def count(self, caller: str) -> int:
        return self._counts.get(caller, (0, None))[0]

    def release(self, caller: str, limits: KeyLimits) -> int:
        """Returns how many are left."""
        count = self._counts[caller][0] - 1
        if count:
            self._counts[caller] = count, limits
        else:
            del self._counts[caller]
        return count

    def asks(self) -> list[Ask]:
        """What tells of all."""
        return [slots_of(caller, limits, count) for caller, (count, limits) in self._counts.items()]
