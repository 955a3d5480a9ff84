"""Charges requests to the quotas of the server, and makes the errors of refused requests. Pure: no I/O."""

from collections.abc import Iterator

from penstock.core.config import QuotaSettings
from penstock.core.errors import RateLimited
from penstock.core.principals import LimitStatus
from penstock.core.requests import InferRequest
from penstock.storage.limits.limit_store import Charge, ChargeResult, Rate, Spend

BURST_S = 1.0  # of the quotas per second
SERVER = "quota"  # the key of the quota for all requests


class QuotaCharges:
    """Lists a request's charges against three quotas: of the whole server, of the session and of the block."""

    def __init__(self, settings: QuotaSettings) -> None:
        self._server = _make_spends_per_second("requests_per_second_total", settings.requests_per_second_total)
        self._session = (
            *_make_spends_per_second("requests_per_second_per_session", settings.requests_per_second_per_session),
            *_make_spends_per_period("requests_per_session_id", settings.requests_per_session_id, settings.reset_s),
        )
        self._block = (
            *_make_spends_per_second("requests_per_second_per_block_id", settings.requests_per_second_per_block_id),
            *_make_spends_per_period("requests_per_block_id", settings.requests_per_block_id, settings.reset_s),
        )
        self.is_empty = not (self._server or self._session or self._block)

    def of(self, request: InferRequest, block_id: str) -> list[Charge]:
        charges = [Charge(SERVER, self._server)] if self._server else []
        if self._session and (session_id := get_session_id(request)):
            charges.append(Charge(f"quota:session:{session_id}", self._session))
        if self._block:
            charges.append(Charge(f"quota:block:{block_id}", self._block))
        return charges


def get_session_id(request: InferRequest) -> str:
    """Return the request's session id or an empty string. The id includes the API key, so keys share no sessions."""
    step = request.controls.session
    given = request.packet.session_id if request.packet is not None else "" if step is None else step.session_id
    return request.principal.prefix_session_id(given) if given else ""


def make_refund(charge: Charge) -> Charge:
    """Return a charge that gives back what `charge` took."""
    spends = tuple([Spend(spend.rate, -spend.cost) for spend in charge.spends])
    return Charge(charge.key, spends, is_owed=True)


def make_quota_error(charge: Charge, result: ChargeResult) -> RateLimited:
    rate = next(spend.rate for spend in charge.spends if spend.rate.name == result.limit)
    whose = "this server" if charge.key == SERVER else "this session" if "session" in rate.name else "this block"
    is_total = rate.is_total
    each = f"{rate.per_s * rate.burst_s:.0f} in {rate.burst_s:g} s" if is_total else f"{rate.per_s:g} per second"
    error = RateLimited(
        f"the quota of {whose} is used up ({rate.name}, {each}): try again in {result.retry_after_s:.3g} s",
        limit=result.limit,
        retry_after_s=f"{result.retry_after_s:.6f}",
    )
    error.limit_statuses = tuple(_make_statuses(charge, result))
    return error


def _make_statuses(charge: Charge, result: ChargeResult) -> Iterator[LimitStatus]:
    for (rate, _), used_s in zip(charge.spends, result.used_s, strict=True):
        window_s = max(rate.burst_s, 1 / rate.per_s)
        quota = max(1, round(rate.per_s * window_s))
        left = max(0, int(quota - used_s * rate.per_s + 1e-6))
        reset_s = result.retry_after_s if rate.name == result.limit else used_s
        yield LimitStatus(rate.name, quota, round(window_s), left, reset_s)


def _make_spends_per_second(name: str, limit: float) -> tuple[Spend, ...]:
    return (Spend(Rate(name, limit, BURST_S), 1),) if limit else ()


def _make_spends_per_period(name: str, limit: int, reset_s: int) -> tuple[Spend, ...]:
    return (Spend(Rate(name, limit / reset_s, reset_s, is_total=True), 1),) if limit else ()
