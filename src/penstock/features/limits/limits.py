"""Charges requests to the limits of their callers, and makes the errors of refused requests. Pure: no I/O.

Each limited quantity (requests, rows, tokens) is a named rate. A limit store records how much of each rate is used.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, inf

from penstock.core.errors import RateLimited
from penstock.core.principals import ANYBODY, NOBODY, KeyLimits, LimitStatus, Principal
from penstock.storage.limits.limit_store import CONCURRENCY, Charge, ChargeResult, Rate, Spend

REQUESTS, ROWS, TOKENS = "requests", "rows", "tokens"


@lru_cache(4096)
def list_rates(limits: KeyLimits) -> tuple[Rate, ...]:
    named = (REQUESTS, limits.requests_per_s), (ROWS, limits.rows_per_s), (TOKENS, limits.tokens_per_s)
    return tuple(Rate(name, per_s, limits.burst_s) for name, per_s in named if 0 < per_s < inf)


def is_limited(limits: KeyLimits) -> bool:
    return bool(limits.concurrency or list_rates(limits))


def make_request_charge(caller: str, limits: KeyLimits, rows: int, in_flight: int) -> Charge:
    """Return the charge of a request that arrives. Tokens are charged later, but a caller with none left is refused."""
    costs = {REQUESTS: 1, ROWS: rows, TOKENS: 0}
    spends = tuple([Spend(rate, costs[rate.name]) for rate in list_rates(limits)])
    return Charge(caller, spends, limits.concurrency, in_flight)


def make_token_charge(caller: str, limits: KeyLimits, tokens: int) -> Charge:
    """Return the charge for an answer's tokens. If the tokens exceed the limit, the caller's next requests fail."""
    spends = tuple([Spend(rate, tokens) for rate in list_rates(limits) if rate.name == TOKENS])
    return Charge(caller, spends, is_owed=True)


def make_in_flight_charge(caller: str, limits: KeyLimits, in_flight: int) -> Charge:
    """Return a charge that takes nothing, and only reports how many requests the caller has in flight."""
    return Charge(caller, (), limits.concurrency, in_flight, is_owed=True)


def make_limit_statuses(charge: Charge, result: ChargeResult) -> tuple[LimitStatus, ...]:
    return tuple(_make_statuses(charge, result))


def _make_statuses(charge: Charge, result: ChargeResult) -> Iterator[LimitStatus]:
    for (rate, _), used_s in zip(charge.spends, result.used_s, strict=True):
        window_s = ceil(max(rate.burst_s, 1 / rate.per_s))
        left = max(0, int((rate.burst_s - used_s) * rate.per_s + 1e-6))
        yield LimitStatus(rate.name, int(rate.per_s * window_s + 1e-6), window_s, left, used_s)
    if charge.max_in_flight:
        yield LimitStatus(CONCURRENCY, charge.max_in_flight, 0, max(0, charge.max_in_flight - charge.in_flight), 0.0)


def make_refusal(principal: Principal, limits: KeyLimits, charge: Charge, result: ChargeResult) -> RateLimited:
    who = "your address" if is_anonymous(principal) else f"the key '{principal.name}'"
    if result.limit == CONCURRENCY:
        why = f"{who} has {limits.concurrency} requests in flight, which is the limit: wait until one ends"
    else:
        rate = next(rate for rate in list_rates(limits) if rate.name == result.limit)
        allowed, wait = f"{rate.per_s:g} {rate.name} per second", f"{result.retry_after_s:.3g} s"
        why = f"{who} has used its limit of {allowed}: try again in {wait}"
    error = RateLimited(why, limit=result.limit, retry_after_s=f"{result.retry_after_s:.6f}")
    error.limit_statuses = make_limit_statuses(charge, result)
    return error


def is_anonymous(principal: Principal) -> bool:
    return principal is ANYBODY or principal is NOBODY


def identify_caller(principal: Principal, client: str) -> str:
    """Return the name under which a caller's requests are counted: the id of its key, or without a key its address."""
    if principal.key_id:
        return f"key:{principal.key_id}"
    return f"address:{client}" if is_anonymous(principal) else f"name:{principal.name}"


class RequestsInFlight:
    """Counts the requests that each caller has in flight at this gateway."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, KeyLimits]] = {}

    def take(self, caller: str, limits: KeyLimits) -> int:
        """Count a request; return how many requests the caller has in flight. Call `release` when the request ends."""
        count = self._counts.get(caller, (0, limits))[0] + 1
        self._counts[caller] = count, limits
        return count

    def count(self, caller: str) -> int:
        return self._counts.get(caller, (0, None))[0]

    def release(self, caller: str, limits: KeyLimits) -> int:
        """Stop counting a request that ended; return how many requests the caller still has in flight."""
        count = self._counts[caller][0] - 1
        if count:
            self._counts[caller] = count, limits
        else:
            del self._counts[caller]
        return count

    def list_charges(self) -> list[Charge]:
        """Return charges that report how many requests each caller has in flight."""
        return [make_in_flight_charge(caller, limits, count) for caller, (count, limits) in self._counts.items()]
