"""Holds requests against their callers' limits: what a caller may ask for in a second, and at once."""

from penstock.access.limits import (
    TOKENS,
    Held,
    caller_of,
    is_anonymous,
    is_limited,
    owed_of,
    refusal,
    request_of,
    slots_of,
    standings,
)
from penstock.core.blocks import BlockDescription
from penstock.core.config import AccessSettings, KeyLimitSettings
from penstock.core.errors import RateLimited
from penstock.core.principals import KeyLimits, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.storage.limits.base import Ask, LimitStore, Taken
from penstock.telemetry.metrics import LimitMetrics

TOLD_S = 3.0  # how often a shared store hears of those inside, who else would be forgotten


class Meter:
    def __init__(self, store: LimitStore, settings: AccessSettings, metrics: LimitMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._of_keys = _limits(settings.key_limits)
        self._of_anonymous = _limits(settings.anonymous_limits)
        self.has_defaults = self._of_keys is not None or self._of_anonymous is not None
        self._held = Held()
        self._gateways = 1
        self._errors = 0
        self._tell_at = 0.0

    async def start(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        await self._store.close()

    def check(self, principal: Principal, client: str) -> None:
        """Before a message is read: raises where it would certainly be refused then."""
        limits = self._limits_of(principal)
        if limits is None:
            return
        caller = caller_of(principal, client)
        ask = request_of(caller, limits, 0, self._held.count(caller) + 1)
        if (refused := self._store.refusal(ask)) is not None:
            raise self._refuse(principal, limits, ask, refused)

    async def take(self, request: InferRequest, block: BlockDescription) -> "Metered | None":
        """Raises RateLimited; what it returns must be ended. None: there are no limits."""
        limits = self._limits_of(request.principal)
        if limits is None:
            return None
        caller = caller_of(request.principal, request.client)
        held = self._held.take(caller, limits) if limits.concurrency else 0
        metered = Metered(self, caller, limits)
        ask = request_of(caller, limits, _rows(request, block), held)
        try:
            taken = self._store.take_now(ask) or await self._store.take(ask)
        except BaseException:
            metered.end()
            raise
        if taken.limit:
            metered.end()
            raise self._refuse(request.principal, limits, ask, taken)
        request.standings = standings(ask, taken)
        return metered

    def gateways_changed(self, count: int) -> None:
        self._gateways = max(1, count)
        self._store.set_gateways(self._gateways)

    def tick(self, now: float) -> None:
        """Keeps the metrics true, and what a shared store knows of those inside."""
        self._metrics.away.set(self._store.is_away)
        self._metrics.errors.inc(self._store.errors - self._errors)
        self._errors = self._store.errors
        if now >= self._tell_at:
            self._tell_at = now + TOLD_S
            for ask in self._held.asks():
                self._store.put(ask)

    def status(self) -> dict[str, object]:
        """Whether each gateway holds callers to the whole of their limits, with the others, or to its share."""
        store = self._store
        is_shared = store.name != "memory" and not store.is_away
        return {
            "store": store.name,
            "away": store.is_away,
            "share": 1.0 if is_shared else 1 / self._gateways,
        }

    def _limits_of(self, principal: Principal) -> KeyLimits | None:
        limits = principal.limits
        if limits is not None and is_limited(limits):
            return limits
        return self._of_anonymous if is_anonymous(principal) else self._of_keys

    def _refuse(self, principal: Principal, limits: KeyLimits, ask: Ask, taken: Taken) -> RateLimited:
        self._metrics.refusals.labels(taken.limit).inc()
        return refusal(principal, limits, ask, taken)

    def release(self, caller: str, limits: KeyLimits) -> None:
        self._store.put(slots_of(caller, limits, self._held.release(caller, limits)))

    def owe(self, caller: str, limits: KeyLimits, tokens: int) -> None:
        self._store.put(owed_of(caller, limits, tokens))


class Metered:
    """A request inside that counts."""

    __slots__ = ("_caller", "_limits", "_meter")

    def __init__(self, meter: Meter, caller: str, limits: KeyLimits) -> None:
        self._meter = meter
        self._caller = caller
        self._limits = limits

    def answered(self, response: InferResponse) -> None:
        """Counts the tokens that it tells of."""
        tokens = response.parameters.get(TOKENS)
        if self._limits.tokens_per_s and isinstance(tokens, int) and tokens > 0:
            self._meter.owe(self._caller, self._limits, tokens)

    def end(self) -> None:
        if self._limits.concurrency:
            self._meter.release(self._caller, self._limits)


def _limits(settings: KeyLimitSettings | None) -> KeyLimits | None:
    limits = KeyLimits() if settings is None else KeyLimits(**settings.model_dump())
    return limits if is_limited(limits) else None


def _rows(request: InferRequest, block: BlockDescription) -> int:
    if not block.max_batch_size:
        return 1
    return max([tensor.shape[0] for tensor in request.inputs if tensor.shape], default=1)
