"""Decides which worker a client calls directly for a model, and when it uses a gateway. No I/O."""

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

AUTO_AFTER = 10  # requests for a model before `direct="auto"` looks for a worker
DISCOVER_TIMEOUT_S = 2.0  # timeout of a Discover call; without an answer the request goes through a gateway
# Pauses before the next Discover call: if no worker was found (doubles each time); if the server has no such call.
FIRST_RETRY_S, RARE_RETRY_S = 1.0, 60.0
AVOID_S = 10.0  # a worker that did not answer is not used for this time
RENEW_SHARE, RENEW_RETRY_S = 0.2, 10.0  # renew a token when this share of its lifetime is left; pause between attempts
MIN_TOKEN_USE_S = 10.0  # a new token is used for at least this time, even if this machine's clock is wrong
SILENCE_S, CHECK_TIMEOUT_S = 1.0, 1.0  # time without an answer after which a worker is checked; timeout of the check
MAX_MODELS = 1024  # maximum number of models whose routes are remembered


@dataclass(slots=True)
class WorkerRoute:
    """The route to a worker that holds a block of a model: the worker's address, and the token for its calls."""

    worker_id: str
    address: str
    token: str
    block_id: str
    is_tls: bool
    is_idempotent: bool
    ends_at: float
    renew_at: float


@dataclass(slots=True)
class _ModelRoute:
    """The route to a worker for one model, or the time of the next search for a route."""

    route: WorkerRoute | None = None
    requests: int = 0
    discover_at: float = 0.0  # no Discover before this time
    misses: int = 0  # Discover calls in a row that found no worker


@dataclass(slots=True)
class WorkerRoutes:
    """The known routes to workers, by model and version."""

    is_eager: bool = True  # look for a worker at the first request for a model
    is_secure: bool = False  # the client uses TLS with gateways, so workers must have it too
    _models: dict[tuple[str, str], _ModelRoute] = field(default_factory=dict)
    _avoided: dict[str, float] = field(default_factory=dict)  # until when, by worker

    def choose(self, model: str, version: str, now: float) -> tuple[WorkerRoute | None, pb.DiscoverRequest | None]:
        """Return the cached worker route, and the Discover request that renews the route before it expires.

        (None, None) means: use a gateway.
        """
        model_route = self._models.get((model, version))
        if model_route is None:
            while len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            model_route = self._models[model, version] = _ModelRoute()
        model_route.requests += 1
        route = model_route.route
        if route is not None and now >= route.ends_at:
            route = model_route.route = None
        is_due = route is None or now >= route.renew_at
        if not is_due or now < model_route.discover_at or (not self.is_eager and model_route.requests <= AUTO_AFTER):
            return route, None
        # Other requests meanwhile do not wait for the answer.
        model_route.discover_at = now + (DISCOVER_TIMEOUT_S if route is None else RENEW_RETRY_S)
        self._avoided = {worker: until for worker, until in self._avoided.items() if now < until}
        return route, pb.DiscoverRequest(model=model, version=version, avoid=sorted(self._avoided))

    def store_route(
        self, model: str, version: str, answer: pb.DiscoverResponse, now: float, unix: float
    ) -> WorkerRoute | None:
        """Store and return the route in a Discover answer.

        `unix` is the wall-clock time, which is needed if the answer has no `lives_s`.
        """
        model_route = self._models.setdefault((model, version), _ModelRoute())
        if not answer.worker_id or not answer.address or (self.is_secure and not answer.is_tls):
            model_route.discover_at = now + RARE_RETRY_S
            return None
        lifetime_s = max(MIN_TOKEN_USE_S, answer.lives_s or answer.expires_at - unix)
        model_route.discover_at, model_route.misses = 0.0, 0
        model_route.route = WorkerRoute(
            answer.worker_id,
            answer.address,
            answer.token,
            answer.block_id,
            answer.is_tls,
            answer.is_idempotent,
            now + lifetime_s,
            now + (1 - RENEW_SHARE) * lifetime_s,
        )
        return model_route.route

    def keep_route_after_error(self, model: str, version: str, error: PenstockError, now: float) -> WorkerRoute | None:
        """Schedule the next Discover call after a failed call; return the current route if it is still valid."""
        model_route = self._models.setdefault((model, version), _ModelRoute())
        if model_route.route is None:
            may_succeed = error.is_retryable or isinstance(error, DeadlineExceeded)
            model_route.discover_at = now + (
                min(FIRST_RETRY_S * 2.0**model_route.misses, RARE_RETRY_S) if may_succeed else RARE_RETRY_S
            )
            model_route.misses = min(model_route.misses + 1, 10)
        return model_route.route

    def drop_failed_route(self, route: WorkerRoute, error: PenstockError, now: float) -> bool:
        """Drop the worker's routes if the worker caused the error; return whether to send the request to a gateway."""
        if isinstance(error, Unavailable | DeadlineExceeded | Unauthenticated | UnknownModel):
            self._drop_routes(route)
            if type(error) is Unavailable or isinstance(error, DeadlineExceeded):
                self._avoided[route.worker_id] = now + AVOID_S
        if isinstance(error, RateLimited | RequestTooLarge):
            return False
        if isinstance(error, Refused | Unauthenticated | UnknownModel | ModelNotReady):
            return True
        return isinstance(error, Unavailable) and (error.is_definite or route.is_idempotent)

    def _drop_routes(self, route: WorkerRoute) -> None:
        for model_route in list(self._models.values()):
            if model_route.route is not None and model_route.route.worker_id == route.worker_id:
                model_route.route = None
