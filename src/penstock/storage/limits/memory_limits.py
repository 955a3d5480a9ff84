"""Limits in the memory of one process; each of several gateways applies its share of every limit."""

import time
from collections.abc import Callable

from penstock.storage.limits.buckets import MAX_KEYS, Buckets
from penstock.storage.limits.limit_store import Charge, ChargeResult


class MemoryLimitStore:
    name = "memory"
    is_away = False
    errors = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS) -> None:
        self._buckets = Buckets(max_keys, time.time() - time.monotonic() if clock is time.monotonic else 0.0)
        self._clock = clock
        self._share = 1

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def set_gateways(self, count: int) -> None:
        self._share = max(1, count)

    def take_now(self, charge: Charge) -> ChargeResult | None:
        return self._take(charge)

    async def take(self, charge: Charge) -> ChargeResult:
        return self._take(charge)

    def put(self, charge: Charge) -> None:
        if charge.spends:
            self._take(charge)

    def find_refusal(self, charge: Charge) -> ChargeResult | None:
        return self._buckets.find_refusal(charge, self._clock(), self._share)

    def _take(self, charge: Charge) -> ChargeResult:
        return self._buckets.take(charge, self._clock(), self._share)
