"""The protocol of a store of callers' use of their limits: charges and their results."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

CONCURRENCY = "concurrency"


class Rate(NamedTuple):
    """One limited quantity of a caller, for example requests; its bucket holds `burst_s` seconds of the rate.

    A total is a quota per period. Its bucket does not refill evenly, but is full again when a period starts: at each
    multiple of `burst_s` since 1970 (UTC).
    `burst_s` is then a whole number.
    """

    name: str
    per_s: float
    burst_s: float
    is_total: bool = False


class Spend(NamedTuple):
    """An amount to take from one rate's bucket."""

    rate: Rate
    cost: float  # 0: take nothing, but refuse if the bucket is empty

    @property
    def cost_s(self) -> float:
        return self.cost / self.rate.per_s

    def compute_need_s(self, share: int = 1) -> float:
        """Return what the bucket must contain: the cost, but at most a full bucket; a larger cost makes a debt."""
        if self.rate.is_total:  # half a request, because the rounding errors of many costs add up
            return 0.5 * share / self.rate.per_s
        return min(max(self.cost, 1.0) * share / self.rate.per_s, self.rate.burst_s)


@dataclass(frozen=True, slots=True)
class Charge:
    """Amounts to take from a caller's limits; either all amounts are taken or none."""

    key: str  # the caller
    spends: tuple[Spend, ...]
    max_in_flight: int = 0  # requests that the caller may have in flight; 0: any number
    in_flight: int = 0  # requests that the caller has in flight at this gateway, including this request
    is_owed: bool = False  # the cost is already incurred, so it is taken even if this makes a debt


@dataclass(frozen=True, slots=True)
class ChargeResult:
    """The result of a charge: the use of each bucket, and the name of the limit that refused the charge."""

    used_s: tuple[float, ...]  # used part of each spend's bucket, in seconds of its rate; a debt exceeds its burst
    limit: str = ""  # the limit that refused the charge; empty: the charge was taken
    retry_after_s: float = 0.0


class LimitStore(Protocol):
    """Stores the callers' use of their limits.

    No call fails: while a shared store is unavailable, this process applies its own share of each limit.
    """

    name: str
    is_away: bool  # a shared store is unavailable
    errors: int  # charges that a shared store did not answer

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def set_gateways(self, count: int) -> None:
        """Set the number of gateways, among which each limit is divided if they do not share a store."""
        ...

    def take_now(self, charge: Charge) -> ChargeResult | None:
        """Return the result if it is known without waiting, or None if `take` must be awaited."""
        ...

    async def take(self, charge: Charge) -> ChargeResult: ...

    def find_refusal(self, charge: Charge) -> ChargeResult | None:
        """Return the refusal if `take` would certainly refuse the charge now; take nothing."""
        ...

    def put(self, charge: Charge) -> None:
        """Take an owed charge, or report how many requests are in flight, without waiting for a result."""
        ...
