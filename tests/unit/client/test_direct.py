"""Which worker a client goes to, by what Discover and the workers say."""

import pytest

from penstock.client.direct import (
    AGAIN_S,
    AUTO_AFTER,
    AVOID_S,
    MAX_MODELS,
    NEVER_S,
    RENEW_AGAIN_S,
    WorkerWay,
    WorkerWays,
)
from penstock.client.faults import silent, unreachable
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


def found(ways: WorkerWays, worker: str = "w", now: float = 0.0, lasts_s: float = 900, **fields: bool) -> WorkerWay:
    assert ways.choose("m", "", now)[1] is not None
    way = ways.found("m", "", told(worker, lasts_s, **fields), now, UNIX)
    assert way is not None
    return way


def test_it_is_asked_for_once_and_kept_until_it_is_renewed() -> None:
    ways = WorkerWays()
    way = found(ways)
    assert ways.choose("m", "", 1) == (way, None)
    assert ways.choose("m", "2", 1)[1] == pb.DiscoverRequest(model="m", version="2")
    kept, question = ways.choose("m", "", 721)
    assert (kept, question) == (way, pb.DiscoverRequest(model="m"))
    assert ways.choose("m", "", 722) == (way, None)  # somebody asks already
    assert ways.not_found("m", "", Unavailable("no manager"), 722) is way
    assert ways.choose("m", "", 722 + RENEW_AGAIN_S)[1] is not None
    assert ways.choose("m", "", 901)[0] is None


def test_a_clock_that_is_wrong_does_not_end_a_token_at_once() -> None:
    ways = WorkerWays()
    way = found(ways, lasts_s=-5000)
    assert ways.choose("m", "", 5) == (way, None)


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [(Unavailable("none"), AGAIN_S), (DeadlineExceeded("late"), AGAIN_S), (Forbidden("no"), NEVER_S)],
)
def test_where_there_is_none_it_goes_routed_for_a_while(error: PenstockError, pause_s: float) -> None:
    ways = WorkerWays()
    assert ways.choose("m", "", 0)[1] is not None
    assert ways.not_found("m", "", error, 0) is None
    assert ways.choose("m", "", pause_s - 0.1) == (None, None)
    assert ways.choose("m", "", pause_s)[1] is not None
    ways.not_found("m", "", error, pause_s)
    assert ways.choose("m", "", pause_s + 1.9 * AGAIN_S) == (None, None)


def test_auto_asks_when_a_model_is_asked_often() -> None:
    ways = WorkerWays(is_eager=False)
    assert [ways.choose("m", "", 0) for _ in range(AUTO_AFTER)] == [(None, None)] * AUTO_AFTER
    assert ways.choose("m", "", 0)[1] is not None


def test_who_speaks_tls_goes_to_no_worker_that_does_not() -> None:
    ways = WorkerWays(is_secure=True)
    assert ways.choose("m", "", 0)[1] is not None
    assert ways.found("m", "", told(), 0, UNIX) is None
    assert ways.choose("m", "", 1) == (None, None)
    assert WorkerWays(is_secure=True).found("m", "", told(is_tls=True), 0, UNIX) is not None
    gateway = pb.DiscoverResponse(gateway_id="g", address="g:1")
    assert WorkerWays().found("m", "", gateway, 0, UNIX) is None


@pytest.mark.parametrize(
    ("error", "is_routed", "is_left", "is_avoided"),
    [
        (unreachable("w:1", "failed to connect"), True, True, True),
        (silent("w:1"), False, True, True),
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
def test_what_fails_at_a_worker(error: PenstockError, is_routed: bool, is_left: bool, is_avoided: bool) -> None:
    ways = WorkerWays()
    way = found(ways)
    assert ways.failed(way, error, 0) == is_routed
    left, question = ways.choose("m", "", AVOID_S - 1)
    assert (left is None) == is_left
    if is_left:
        assert question == pb.DiscoverRequest(model="m", avoid=["w"] if is_avoided else [])
        ways.not_found("m", "", error, 0)
        assert ways.choose("m", "", AVOID_S + 100)[1] == pb.DiscoverRequest(model="m")


def test_what_may_have_run_is_repeated_where_the_model_allows_it() -> None:
    ways = WorkerWays()
    assert ways.failed(found(ways, is_idempotent=True), silent("w:1"), 0)


def test_all_models_leave_a_worker_that_is_gone() -> None:
    ways = WorkerWays()
    way = found(ways)
    ways.choose("n", "", 0)
    ways.found("n", "", told(), 0, UNIX)
    ways.failed(way, silent("w:1"), 0)
    assert ways.choose("n", "", 1)[0] is None


def test_so_many_models_are_known() -> None:
    ways = WorkerWays()
    for number in range(MAX_MODELS + 10):
        ways.choose(str(number), "", 0)
    assert len(ways._sought) == MAX_MODELS
