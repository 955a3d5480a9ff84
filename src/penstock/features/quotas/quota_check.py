"""Checks requests against the server's quotas, in the store that also counts the callers' limits."""

import asyncio

from penstock.core.config import QuotaSettings
from penstock.core.errors import RateLimited
from penstock.core.requests import InferRequest
from penstock.features.quotas.quotas import QuotaCharges, make_quota_error, make_refund
from penstock.storage.limits.limit_store import Charge, ChargeResult, LimitStore
from penstock.telemetry.metrics import LimitMetrics


class QuotaCheck:
    def __init__(self, store: LimitStore, settings: QuotaSettings, metrics: LimitMetrics) -> None:
        """Create a check. The caller starts and closes `store`."""
        self._store = store
        self._metrics = metrics
        self._charges = QuotaCharges(settings)
        self.is_on = not self._charges.is_empty

    async def take(self, request: InferRequest, block_id: str) -> None:
        """Charge the request to all quotas; if one refuses it, raise RateLimited and charge nothing."""
        charges = self._charges.of(request, block_id)
        for charge in charges:
            if (certain := self._store.find_refusal(charge)) is not None:
                raise self._make_refusal(charge, certain)
        known = [self._store.take_now(charge) for charge in charges]
        taken = [each for each in known if each is not None]
        if len(taken) < len(charges):  # a shared store gets these charges in one call
            taken = await asyncio.gather(*map(self._store.take, charges))
        refused = [each for each in zip(charges, taken, strict=True) if each[1].limit]
        if refused:
            for charge, result in zip(charges, taken, strict=True):
                if not result.limit:
                    self._store.put(make_refund(charge))
            raise self._make_refusal(*max(refused, key=lambda each: each[1].retry_after_s))

    def _make_refusal(self, charge: Charge, result: ChargeResult) -> RateLimited:
        self._metrics.refusals.labels(result.limit).inc()
        return make_quota_error(charge, result)
