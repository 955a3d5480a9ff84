"""What callers have used of their limits: what is asked of a store, and what it answers."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

CONCURRENCY = "concurrency"


class Rate(NamedTuple):
    """One dimension of a caller's limits; a bucket that holds `burst_s` seconds of it."""

    name: str
    per_s: float
    burst_s: float


class Spend(NamedTuple):
    rate: Rate
    cost: float  # 0: nothing yet, but something must be left

    @property
    def cost_s(self) -> float:
        return self.cost / self.rate.per_s

    def need_s(self, share: int = 1) -> float:
        """What must be free in the bucket. What is larger than the bucket needs it empty, and goes into debt."""
        return min(max(self.cost, 1.0) * share / self.rate.per_s, self.rate.burst_s)


@dataclass(frozen=True, slots=True)
class Ask:
    """All of it is taken, or none."""

    key: str  # whose
    spends: tuple[Spend, ...]
    slots: int = 0  # requests that may be inside at once; 0: any number
    held: int = 0  # of them at this gateway, this one too
    is_owed: bool = False  # it has happened: taken whatever is left, which may be a debt


@dataclass(frozen=True, slots=True)
class Taken:
    used_s: tuple[float, ...]  # of each spend's bucket, in seconds of its rate; a debt is more than its burst
    limit: str = ""  # which refused it; empty: none, and it is taken
    retry_after_s: float = 0.0


class LimitStore(Protocol):
    """None of its calls fails: where a shared store is away, this process's own share of each limit holds."""

    name: str
    is_away: bool
    errors: int  # asks that a shared store did not answer

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def set_gateways(self, count: int) -> None:
        """Among how many each limit is divided where they do not share a store."""
        ...

    def take_now(self, ask: Ask) -> Taken | None:
        """What can be said without waiting; None: `take` must be awaited."""
        ...

    async def take(self, ask: Ask) -> Taken: ...

    def refusal(self, ask: Ask) -> Taken | None:
        """Why it would certainly not be taken now; nothing is taken."""
        ...

    def put(self, ask: Ask) -> None:
        """Takes what is owed, or tells how many are held now; nobody waits for it."""
        ...
