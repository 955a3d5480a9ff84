"""Checks requests against the limits of their callers, and charges the requests to these limits."""

from penstock.core.blocks import BlockDescription
from penstock.core.config import AccessSettings, KeyLimitSettings
from penstock.core.errors import RateLimited
from penstock.core.principals import KeyLimits, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.features.limits.limits import (
    TOKENS,
    RequestsInFlight,
    identify_caller,
    is_anonymous,
    is_limited,
    make_in_flight_charge,
    make_limit_statuses,
    make_refusal,
    make_request_charge,
    make_token_charge,
)
from penstock.storage.limits.limit_store import Charge, ChargeResult, LimitStore
from penstock.telemetry.metrics import LimitMetrics

REPORT_S = 3.0  # how often the requests in flight are reported to a shared store, where old reports expire


class Meter:
    """Charges requests to their callers' limits. Callers without limits have the configured default limits."""

    def __init__(self, store: LimitStore, settings: AccessSettings, metrics: LimitMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._of_keys = _to_key_limits(settings.key_limits)
        self._of_anonymous = _to_key_limits(settings.anonymous_limits)
        self.has_defaults = self._of_keys is not None or self._of_anonymous is not None
        self._held = RequestsInFlight()
        self._gateways = 1
        self._errors = 0
        self._next_report = 0.0

    async def start(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        await self._store.close()

    def check(self, principal: Principal, client: str) -> None:
        """Raise RateLimited if a request would certainly be refused; to be called before the message is read."""
        limits = self._find_limits(principal)
        if limits is None:
            return
        caller = identify_caller(principal, client)
        charge = make_request_charge(caller, limits, 0, self._held.count(caller) + 1)
        if (refused := self._store.find_refusal(charge)) is not None:
            raise self._make_refusal(principal, limits, charge, refused)

    async def take(self, request: InferRequest, block: BlockDescription) -> "Metered | None":
        """Charge the request; return a `Metered`, whose `end` must be called, or None if the caller has no limits.

        Raise RateLimited if a limit refuses the request.
        """
        limits = self._find_limits(request.principal)
        if limits is None:
            return None
        caller = identify_caller(request.principal, request.client)
        held = self._held.take(caller, limits) if limits.concurrency else 0
        metered = Metered(self, caller, limits)
        charge = make_request_charge(caller, limits, _count_rows(request, block), held)
        try:
            taken = self._store.take_now(charge) or await self._store.take(charge)
        except BaseException:
            metered.end()
            raise
        if taken.limit:
            metered.end()
            raise self._make_refusal(request.principal, limits, charge, taken)
        request.limit_statuses = make_limit_statuses(charge, taken)
        return metered

    def gateways_changed(self, count: int) -> None:
        self._gateways = max(1, count)
        self._store.set_gateways(self._gateways)

    def tick(self, now: float) -> None:
        """Update the metrics, and report the requests in flight to a shared store when that is due."""
        self._metrics.away.set(self._store.is_away)
        self._metrics.errors.inc(self._store.errors - self._errors)
        self._errors = self._store.errors
        if now >= self._next_report:
            self._next_report = now + REPORT_S
            for charge in self._held.list_charges():
                self._store.put(charge)

    def get_status(self) -> dict[str, object]:
        """Return the store's name, whether the store is unavailable, and this gateway's share of each limit."""
        store = self._store
        is_shared = store.name != "memory" and not store.is_away
        return {
            "store": store.name,
            "away": store.is_away,
            "share": 1.0 if is_shared else 1 / self._gateways,
        }

    def _find_limits(self, principal: Principal) -> KeyLimits | None:
        limits = principal.limits
        if limits is not None and is_limited(limits):
            return limits
        return self._of_anonymous if is_anonymous(principal) else self._of_keys

    def _make_refusal(
        self, principal: Principal, limits: KeyLimits, charge: Charge, result: ChargeResult
    ) -> RateLimited:
        self._metrics.refusals.labels(result.limit).inc()
        return make_refusal(principal, limits, charge, result)

    def release(self, caller: str, limits: KeyLimits) -> None:
        self._store.put(make_in_flight_charge(caller, limits, self._held.release(caller, limits)))

    def charge_tokens(self, caller: str, limits: KeyLimits, tokens: int) -> None:
        self._store.put(make_token_charge(caller, limits, tokens))


class Metered:
    """A request in flight that counts against its caller's limits."""

    __slots__ = ("_caller", "_limits", "_meter")

    def __init__(self, meter: Meter, caller: str, limits: KeyLimits) -> None:
        self._meter = meter
        self._caller = caller
        self._limits = limits

    def charge_answer(self, response: InferResponse) -> None:
        tokens = response.parameters.get(TOKENS)
        if self._limits.tokens_per_s and isinstance(tokens, int) and tokens > 0:
            self._meter.charge_tokens(self._caller, self._limits, tokens)

    def end(self) -> None:
        if self._limits.concurrency:
            self._meter.release(self._caller, self._limits)


def _to_key_limits(settings: KeyLimitSettings | None) -> KeyLimits | None:
    limits = KeyLimits() if settings is None else KeyLimits(**settings.model_dump())
    return limits if is_limited(limits) else None


def _count_rows(request: InferRequest, block: BlockDescription) -> int:
    if not block.max_batch_size:
        return 1
    return max([tensor.shape[0] for tensor in request.inputs if tensor.shape], default=1)
