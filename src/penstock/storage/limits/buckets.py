"""How much of its rates each caller has used: a generic cell rate algorithm, several dimensions at once. Decides only.

A bucket is a point of time: until then, what was taken is not yet made good at its rate. It is past where nothing
is owed, and forgotten then.
"""

from collections import OrderedDict
from math import ceil

from penstock.storage.limits.base import CONCURRENCY, Ask, Taken

MAX_KEYS = 100_000
TIDIED = 2  # that are looked at for each that comes
SOON_S = 0.1  # when a slot may be free again: nobody knows
EXACT_S = 1e-9  # what sums of floating point may be off


class _Used:
    __slots__ = ("is_ahead", "until")

    def __init__(self) -> None:
        self.until: dict[str, float] = {}  # by the name of the rate
        self.is_ahead = False  # something was taken that a shared store has not heard of


class Buckets:
    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._used: OrderedDict[str, _Used] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._used)

    def take(self, ask: Ask, now: float, share: int = 1) -> Taken:
        """`share`: this is one of so many, and has its part of each limit."""
        if not ask.is_owed and (refusal := self.refusal(ask, now, share)) is not None:
            return refusal
        used = self._of(ask.key, now)
        used.is_ahead = True
        for spend in ask.spends:
            until = max(used.until.get(spend.rate.name, now), now)
            used.until[spend.rate.name] = until + spend.cost_s * share
        return Taken(self._used_s(ask, now))

    def refusal(self, ask: Ask, now: float, share: int = 1) -> Taken | None:
        """Why it would not be taken now; None: it would."""
        limit, wait_s = "", 0.0
        if ask.slots and ask.held > ceil(ask.slots / share):
            limit, wait_s = CONCURRENCY, SOON_S
        used_s = self._used_s(ask, now)
        for spend, each_s in zip(ask.spends, used_s, strict=True):
            missing_s = each_s + spend.need_s(share) - spend.rate.burst_s
            if missing_s > max(wait_s, EXACT_S):
                limit, wait_s = spend.rate.name, missing_s
        return Taken(used_s, limit, wait_s) if limit else None

    def foresee(self, ask: Ask, now: float) -> Taken | None:
        """The refusal that is certain, whatever others have taken meanwhile; None: it is not, or the shared store must
        hear of something first."""
        used = self._used.get(ask.key)
        return None if used is not None and used.is_ahead else self.refusal(ask, now)

    def set(self, ask: Ask, taken: Taken, now: float) -> None:
        """A shared store says how far they are used."""
        used = self._of(ask.key, now)
        used.is_ahead = used.is_ahead and len(ask.spends) < len(used.until)
        for spend, used_s in zip(ask.spends, taken.used_s, strict=True):
            used.until[spend.rate.name] = now + used_s

    def floors(self, ask: Ask, now: float) -> tuple[bool, tuple[float, ...]]:
        """Whether a shared store lacks something, and what is used at least by what this one knows."""
        used = self._used.get(ask.key)
        return used is not None and used.is_ahead, self._used_s(ask, now)

    def _used_s(self, ask: Ask, now: float) -> tuple[float, ...]:
        used = self._used.get(ask.key)
        if used is None:
            return (0.0,) * len(ask.spends)
        return tuple([max(used.until.get(spend.rate.name, now) - now, 0.0) for spend in ask.spends])

    def _of(self, key: str, now: float) -> _Used:
        used = self._used.get(key)
        if used is not None:
            self._used.move_to_end(key)
            return used
        self._tidy(now)
        used = self._used[key] = _Used()
        return used

    def _tidy(self, now: float) -> None:
        for _ in range(min(TIDIED, len(self._used))):
            key, oldest = next(iter(self._used.items()))
            if len(self._used) < self._max_keys and any(until > now for until in oldest.until.values()):
                return
            del self._used[key]
