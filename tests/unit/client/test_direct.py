"""The worker that a client selects, by the answers of Discover and of the workers."""

import pytest

from penstock.client.direct import (
    AUTO_AFTER,
    AVOID_S,
    FIRST_RETRY_S,
    MAX_MODELS,
    RARE_RETRY_S,
    RENEW_RETRY_S,
    WorkerRoute,
    WorkerRoutes,
)
from penstock.client.faults import make_unreachable_error, make_unresponsive_error
from penstock.core.errors import (
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    InvalidTensor,
    ModelNotReady,
    PenstockError,
    QueueFull,
    RateLimited,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from penstock.pb.v1 import access_pb2 as pb

UNIX = 1_000_000.0


def told(worker: str = "w", lasts_s: float = 900, **fields: bool) -> pb.DiscoverResponse:
    found = pb.DiscoverResponse(
        worker_id=worker, address=f"{worker}:1", token="t", block_id="b", expires_at=UNIX + lasts_s
    )
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def found(
    routes: WorkerRoutes, worker: str = "w", now: float = 0.0, lasts_s: float = 900, **fields: bool
) -> WorkerRoute:
    assert routes.choose("m", "", now)[1] is not None
    route = routes.store_route("m", "", told(worker, lasts_s, **fields), now, UNIX)
    assert route is not None
    return route


def test_the_worker_is_discovered_once_and_kept_until_the_token_is_renewed() -> None:
    routes = WorkerRoutes()
    route = found(routes)
    assert routes.choose("m", "", 1) == (route, None)
    assert routes.choose("m", "2", 1)[1] == pb.DiscoverRequest(model="m", version="2")
    kept, question = routes.choose("m", "", 721)
    assert (kept, question) == (route, pb.DiscoverRequest(model="m"))
    assert routes.choose("m", "", 722) == (route, None)  # another request is already asking
    assert routes.keep_route_after_error("m", "", Unavailable("no manager"), 722) is route
    assert routes.choose("m", "", 722 + RENEW_RETRY_S)[1] is not None
    assert routes.choose("m", "", 901)[0] is None


def test_a_wrong_clock_does_not_expire_a_token_at_once() -> None:
    routes = WorkerRoutes()
    route = found(routes, lasts_s=-5000)
    assert routes.choose("m", "", 5) == (route, None)


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [
        (Unavailable("none"), FIRST_RETRY_S),
        (DeadlineExceeded("late"), FIRST_RETRY_S),
        (Forbidden("no"), RARE_RETRY_S),
    ],
)
def test_without_a_worker_requests_are_routed_for_a_while(error: PenstockError, pause_s: float) -> None:
    routes = WorkerRoutes()
    assert routes.choose("m", "", 0)[1] is not None
    assert routes.keep_route_after_error("m", "", error, 0) is None
    assert routes.choose("m", "", pause_s - 0.1) == (None, None)
    assert routes.choose("m", "", pause_s)[1] is not None
    routes.keep_route_after_error("m", "", error, pause_s)
    assert routes.choose("m", "", pause_s + 1.9 * FIRST_RETRY_S) == (None, None)


def test_auto_discovers_a_worker_for_frequently_used_models() -> None:
    routes = WorkerRoutes(is_eager=False)
    assert [routes.choose("m", "", 0) for _ in range(AUTO_AFTER)] == [(None, None)] * AUTO_AFTER
    assert routes.choose("m", "", 0)[1] is not None


def test_a_client_with_tls_uses_no_worker_without_tls() -> None:
    routes = WorkerRoutes(is_secure=True)
    assert routes.choose("m", "", 0)[1] is not None
    assert routes.store_route("m", "", told(), 0, UNIX) is None
    assert routes.choose("m", "", 1) == (None, None)
    assert WorkerRoutes(is_secure=True).store_route("m", "", told(is_tls=True), 0, UNIX) is not None
    gateway = pb.DiscoverResponse(gateway_id="g", address="g:1")
    assert WorkerRoutes().store_route("m", "", gateway, 0, UNIX) is None


@pytest.mark.parametrize(
    ("error", "is_routed", "is_left", "is_avoided"),
    [
        (make_unreachable_error("w:1", "failed to connect"), True, True, True),
        (make_unresponsive_error("w:1"), False, True, True),
        (DeadlineExceeded("late"), False, True, True),
        (Unauthenticated("expired"), True, True, False),
        (UnknownModel("replaced"), True, True, False),
        (ModelNotReady("unloaded"), True, True, False),
        (QueueFull("full"), True, False, False),
        (RateLimited("enough"), False, False, False),
        (InvalidTensor("wrong"), False, False, False),
        (EngineFailed("bad"), False, False, False),
    ],
)
def test_failures_at_a_worker_decide_whether_it_is_used_again(
    error: PenstockError, is_routed: bool, is_left: bool, is_avoided: bool
) -> None:
    routes = WorkerRoutes()
    route = found(routes)
    assert routes.drop_failed_route(route, error, 0) == is_routed
    left, question = routes.choose("m", "", AVOID_S - 1)
    assert (left is None) == is_left
    if is_left:
        assert question == pb.DiscoverRequest(model="m", avoid=["w"] if is_avoided else [])
        routes.keep_route_after_error("m", "", error, 0)
        assert routes.choose("m", "", AVOID_S + 100)[1] == pb.DiscoverRequest(model="m")


def test_a_request_that_may_have_run_is_repeated_if_the_model_allows_it() -> None:
    routes = WorkerRoutes()
    assert routes.drop_failed_route(found(routes, is_idempotent=True), make_unresponsive_error("w:1"), 0)


def test_all_models_leave_a_lost_worker() -> None:
    routes = WorkerRoutes()
    route = found(routes)
    routes.choose("n", "", 0)
    routes.store_route("n", "", told(), 0, UNIX)
    routes.drop_failed_route(route, make_unresponsive_error("w:1"), 0)
    assert routes.choose("n", "", 1)[0] is None


def test_the_number_of_known_models_is_limited() -> None:
    routes = WorkerRoutes()
    for number in range(MAX_MODELS + 10):
        routes.choose(str(number), "", 0)
    assert len(routes._models) == MAX_MODELS
