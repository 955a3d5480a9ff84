"""Which worker a client goes to for a model, and when it goes through a gateway. Decides; never waits."""

from dataclasses import dataclass, field

from penstock.core.errors import (
    DeadlineExceeded,
    ModelNotReady,
    PenstockError,
    RateLimited,
    Refused,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from penstock.pb.v1 import access_pb2 as pb

AUTO_AFTER = 10  # requests for a model: fewer are not worth a question
DISCOVER_S = 2.0  # what Discover gets; the request then goes through a gateway
AGAIN_S, NEVER_S = 1.0, 60.0  # until it is asked again: there was no worker (doubles); there is no such thing
AVOID_S = 10.0  # a worker that did not answer
RENEW_SHARE, RENEW_AGAIN_S = 0.2, 10.0  # of a token's time that is left when another is asked for
LEAST_S = 10.0  # of a token, whatever this machine's clock says
CHECK_S, PROBE_S = 1.0, 1.0  # without an answer for so long a worker is asked whether it lives; what it gets for that
MAX_MODELS = 1024  # that are known


@dataclass(slots=True)
class WorkerWay:
    """How a worker is reached that holds a model's block."""

    worker_id: str
    address: str
    token: str
    block_id: str
    is_tls: bool
    is_idempotent: bool
    ends_at: float
    renew_at: float


@dataclass(slots=True)
class _Sought:
    way: WorkerWay | None = None
    asked: int = 0
    ask_at: float = 0.0  # not before
    misses: int = 0  # in a row


@dataclass(slots=True)
class WorkerWays:
    is_eager: bool = True  # from the first request on
    is_secure: bool = False  # it speaks TLS with gateways, so with workers too
    _sought: dict[tuple[str, str], _Sought] = field(default_factory=dict)
    _avoided: dict[str, float] = field(default_factory=dict)  # workers, and until when

    def choose(self, model: str, version: str, now: float) -> tuple[WorkerWay | None, pb.DiscoverRequest | None]:
        """The way that there is, and what to ask for before it is gone; neither: through a gateway."""
        sought = self._sought.get((model, version))
        if sought is None:
            while len(self._sought) >= MAX_MODELS:
                del self._sought[next(iter(self._sought))]
            sought = self._sought[model, version] = _Sought()
        sought.asked += 1
        way = sought.way
        if way is not None and now >= way.ends_at:
            way = sought.way = None
        is_due = way is None or now >= way.renew_at
        if not is_due or now < sought.ask_at or (not self.is_eager and sought.asked <= AUTO_AFTER):
            return way, None
        sought.ask_at = now + (DISCOVER_S if way is None else RENEW_AGAIN_S)  # others go on meanwhile
        self._avoided = {worker: until for worker, until in self._avoided.items() if now < until}
        return way, pb.DiscoverRequest(model=model, version=version, avoid=sorted(self._avoided))

    def found(self, model: str, version: str, told: pb.DiscoverResponse, now: float, unix: float) -> WorkerWay | None:
        """`unix` is what the clock says, as tokens tell their end."""
        sought = self._sought.setdefault((model, version), _Sought())
        if not told.worker_id or not told.address or (self.is_secure and not told.is_tls):
            sought.ask_at = now + NEVER_S
            return None
        lasts_s = max(LEAST_S, told.expires_at - unix)
        sought.ask_at, sought.misses = 0.0, 0
        sought.way = WorkerWay(
            told.worker_id,
            told.address,
            told.token,
            told.block_id,
            told.is_tls,
            told.is_idempotent,
            now + lasts_s,
            now + (1 - RENEW_SHARE) * lasts_s,
        )
        return sought.way

    def not_found(self, model: str, version: str, error: PenstockError, now: float) -> WorkerWay | None:
        """What there was goes on."""
        sought = self._sought.setdefault((model, version), _Sought())
        if sought.way is None:
            may_be = error.is_retryable or isinstance(error, DeadlineExceeded)
            sought.ask_at = now + (min(AGAIN_S * 2.0**sought.misses, NEVER_S) if may_be else NEVER_S)
            sought.misses = min(sought.misses + 1, 10)
        return sought.way

    def failed(self, way: WorkerWay, error: PenstockError, now: float) -> bool:
        """Whether what failed at the worker goes through a gateway; it says so of what a gateway would do no better."""
        if isinstance(error, Unavailable | DeadlineExceeded | Unauthenticated | UnknownModel):
            self._leave(way)
            if type(error) is Unavailable or isinstance(error, DeadlineExceeded):
                self._avoided[way.worker_id] = now + AVOID_S
        if isinstance(error, RateLimited | RequestTooLarge):
            return False
        if isinstance(error, Refused | Unauthenticated | UnknownModel | ModelNotReady):
            return True
        return isinstance(error, Unavailable) and (error.is_definite or way.is_idempotent)

    def _leave(self, way: WorkerWay) -> None:
        for sought in list(self._sought.values()):
            if sought.way is not None and sought.way.worker_id == way.worker_id:
                sought.way = None
