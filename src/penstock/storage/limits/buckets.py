"""Token buckets per caller: the generic cell rate algorithm over several rates at once. Pure: no I/O.

A bucket is stored as the time at which it will be full again; the bucket of a total (a quota per period, such as a day)
is stored as the end of its period plus its use in seconds. A caller is removed when all its buckets are full. If there
are too many callers, the least recently used callers move to a table that needs a few bytes for each of them.
"""

from collections import OrderedDict
from math import ceil, inf

from penstock.storage.limits.evicted_buckets import EvictedBuckets
from penstock.storage.limits.limit_store import CONCURRENCY, Charge, ChargeResult, Rate

MAX_KEYS = 100_000
CLEANED_PER_NEW_KEY = 2  # callers that are checked for removal when a new caller comes
SLOT_RETRY_S = 0.1  # retry hint after a refusal by concurrency, because the end of a request is unknown
# For this time a shared store's report of a used-up total is trusted; later, other gateways may have refunded a part.
FRESH_S = 1.0
TOLERANCE_S = 1e-9  # rounding error of floating-point sums


class _CallerUse:
    __slots__ = ("is_ahead", "known_at", "until")

    def __init__(self) -> None:
        self.known_at = -inf  # when a shared store last reported
        self.until: dict[str, float] = {}  # by rate: when its bucket is full again
        self.is_ahead = False  # this process took charges that the shared store does not know


class Buckets:
    """The buckets of all callers in this process."""

    def __init__(self, max_keys: int = MAX_KEYS, ahead_s: float = 0.0) -> None:
        """Create empty buckets. `ahead_s`: Unix time, which decides when periods of totals end, minus `now`."""
        self.ahead_s = ahead_s
        self._max_keys = max_keys
        self._evicted = EvictedBuckets()
        self._used: OrderedDict[str, _CallerUse] = OrderedDict()  # by caller, least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def take(self, charge: Charge, now: float, share: int = 1) -> ChargeResult:
        """Take a charge from its caller's buckets, or refuse the charge. This process has 1/`share` of each limit."""
        if not charge.is_owed and (refusal := self.find_refusal(charge, now, share)) is not None:
            return refusal
        used = self._find_or_create(charge, now)
        used.is_ahead = True
        for spend in charge.spends:
            unused = self._compute_unused_value(spend.rate, now)
            until = max(used.until.get(spend.rate.name, unused), unused)
            used.until[spend.rate.name] = until + spend.cost_s * share
        return ChargeResult(self._compute_used_s(charge, now))

    def find_refusal(self, charge: Charge, now: float, share: int = 1) -> ChargeResult | None:
        """Return the refusal that `take` would give now, or None if it would take the charge."""
        limit, wait_s = "", 0.0
        if charge.max_in_flight and charge.in_flight > ceil(charge.max_in_flight / share):
            limit, wait_s = CONCURRENCY, SLOT_RETRY_S
        used_s = self._compute_used_s(charge, now)
        for spend, each_s in zip(charge.spends, used_s, strict=True):
            missing_s = each_s + spend.compute_need_s(share) - spend.rate.burst_s
            if missing_s > TOLERANCE_S and spend.rate.is_total:
                missing_s = self._compute_unused_value(spend.rate, now) - now
            if missing_s > max(wait_s, TOLERANCE_S):
                limit, wait_s = spend.rate.name, missing_s
        return ChargeResult(used_s, limit, wait_s) if limit else None

    def find_certain_refusal(self, charge: Charge, now: float) -> ChargeResult | None:
        """Return a refusal that is certain without asking the shared store, or None if the shared store must decide.

        The shared store must also decide while it does not know all charges that this process took.
        """
        used = self._used.get(charge.key)
        if used is not None and used.is_ahead:
            return None
        refused = self.find_refusal(charge, now)
        totals = [spend.rate.name for spend in charge.spends if spend.rate.is_total]
        if refused is None or refused.limit not in totals:
            return refused
        return refused if used is not None and now - used.known_at < FRESH_S else None

    def set_use(self, charge: Charge, result: ChargeResult, now: float) -> None:
        """Set the buckets of a charge to the values that a shared store reported."""
        used = self._find_or_create(charge, now)
        used.known_at = now
        used.is_ahead = used.is_ahead and len(charge.spends) < len(used.until)
        for spend, used_s in zip(charge.spends, result.used_s, strict=True):
            used.until[spend.rate.name] = self._compute_unused_value(spend.rate, now) + used_s

    def compute_minimum_use(self, charge: Charge, now: float) -> tuple[bool, tuple[float, ...]]:
        """Return whether the shared store lacks charges of this process, and the minimum use of each bucket."""
        used = self._used.get(charge.key)
        return used is not None and used.is_ahead, self._compute_used_s(charge, now)

    def _compute_used_s(self, charge: Charge, now: float) -> tuple[float, ...]:
        used = self._used.get(charge.key)
        if used is None:
            until = self._evicted.get(charge.key, [spend.rate.name for spend in charge.spends]) if self._evicted else {}
        else:
            until = used.until
        if not until:
            return (0.0,) * len(charge.spends)
        unused = [(spend.rate.name, self._compute_unused_value(spend.rate, now)) for spend in charge.spends]
        return tuple([max(until.get(name, at) - at, 0.0) for name, at in unused])

    def _compute_unused_value(self, rate: Rate, now: float) -> float:
        """Return the value of a bucket from which nothing was taken: now, or the end of a total's period."""
        return now + rate.burst_s - (now + self.ahead_s) % rate.burst_s if rate.is_total else now

    def _find_or_create(self, charge: Charge, now: float) -> _CallerUse:
        used = self._used.get(charge.key)
        if used is not None:
            self._used.move_to_end(charge.key)
            return used
        self._remove_unused(now)
        used = self._used[charge.key] = _CallerUse()
        if self._evicted:
            used.until = self._evicted.get(charge.key, [spend.rate.name for spend in charge.spends])
        return used

    def _remove_unused(self, now: float) -> None:
        for _ in range(min(CLEANED_PER_NEW_KEY, len(self._used))):
            key, oldest = next(iter(self._used.items()))
            if any(until > now for until in oldest.until.values()):
                if len(self._used) < self._max_keys:
                    return
                self._evicted.put(key, oldest.until, now)
            del self._used[key]
