"""The control parameters of requests."""

import pytest

from penstock.core.controls import ControlReader
from penstock.core.errors import InvalidRequest
from penstock.core.requests import NO_CONTROLS, Controls, SessionStep
from penstock.core.settings import Priorities, QueuePolicy, Routing, Sessions

LEVELS = Priorities(
    levels=3,
    default=2,
    queue=QueuePolicy(timeout_ms=500),
    by_level={3: QueuePolicy(timeout_ms=100, allow_override=True, on_timeout="delay")},
)


def reader(
    priorities: Priorities | None = None, routing: Routing | None = None, sessions: Sessions | None = None
) -> ControlReader:
    return ControlReader(priorities or Priorities(), routing or Routing(), sessions or Sessions())


def test_requests_without_control_parameters_share_one_object() -> None:
    assert reader().read({}) is NO_CONTROLS
    assert reader().read({"temperature": 0.5}) is NO_CONTROLS


def test_a_levels_queue_policy_applies_without_parameters() -> None:
    assert reader(LEVELS).read({}) == Controls(priority=2, queue_timeout_s=0.5)


@pytest.mark.parametrize(("asked", "level"), [(1, 1), (3, 3), (0, 2), (4, 2)])
def test_levels_that_do_not_exist_are_the_default(asked: int, level: int) -> None:
    assert reader(LEVELS).read({"priority": asked}).priority == level


@pytest.mark.parametrize("asked", [-1, "high", 1.5, True])
def test_an_invalid_priority_is_refused(asked: object) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        reader(LEVELS).read({"priority": asked})  # type: ignore[dict-item]


@pytest.mark.parametrize(("timeout_us", "expected_s"), [(50_000, 0.05), (900_000, 0.1), (0, 0.1)])
def test_a_timeout_shortens_the_queue_timeout_if_its_level_allows_it(timeout_us: int, expected_s: float) -> None:
    found = reader(LEVELS).read({"priority": 3, "timeout": timeout_us})
    assert found.queue_timeout_s == pytest.approx(expected_s)
    assert reader(LEVELS).may_override_timeout(found)


def test_a_timeout_does_not_change_the_queue_timeout_otherwise() -> None:
    found = reader(LEVELS).read({"priority": 1, "timeout": 1000})
    assert found.queue_timeout_s == 0.5
    assert not reader(LEVELS).may_override_timeout(found)


def test_a_session_is_read_from_either_parameter() -> None:
    ours = reader().read({"session_id": "s", "seq_no": 3}).session
    tritons = reader().read({"sequence_id": 7, "sequence_start": True, "sequence_end": False}).session
    assert ours == SessionStep("s", 3)
    assert tritons == SessionStep("7", None, is_start=True)
    assert reader().read({"sequence_id": 0}).session is None


def test_a_session_id_alone_gives_no_order() -> None:
    assert reader().read({"session_id": "s"}).session == SessionStep("s", is_ordered=False)
    for asked in ({"seq_no": 1}, {"sequence_start": True}, {"sequence_end": True}, {"sequence_end": False}):
        found = reader().read({"session_id": "s", **asked}).session
        assert found is not None
        assert found.is_ordered
    sequence = reader().read({"sequence_id": 7}).session
    assert sequence is not None
    assert sequence.is_ordered


@pytest.mark.parametrize("sessions", [Sessions(order=True), Sessions(is_stateful=True)])
def test_a_model_may_order_all_its_sessions(sessions: Sessions) -> None:
    assert reader(sessions=sessions).read({"session_id": "s"}).session == SessionStep("s")


@pytest.mark.parametrize(
    "parameters",
    [
        {"session_id": "a", "sequence_id": 2},
        {"seq_no": 1},
        {"sequence_start": True},
        {"session_id": "a", "seq_no": 0},
        {"session_id": "a", "seq_no": "1"},
        {"session_id": "x" * 257},
        {"session_id": 1.5},
        {"session_id": "a", "sequence_end": "yes"},
        {"cache": "maybe"},
    ],
)
def test_invalid_parameters_are_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        reader().read(parameters)  # type: ignore[arg-type]


def test_the_shard_key_is_read_if_the_policy_is_hash() -> None:
    hashed = Routing(policy="hash", key="user")
    assert reader(routing=hashed).read({"user": 42}).shard_key == "42"
    assert reader(routing=hashed).read({"other": 42}).shard_key == ""
    assert reader(routing=Routing(key="user")).read({"user": 42}) is NO_CONTROLS


def test_the_cache_can_be_bypassed() -> None:
    assert reader().read({"cache": "refresh"}).cache == "refresh"
