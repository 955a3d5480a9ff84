"""Liveness of workers by scripts of events: silence, returns, replaced processes and flapping."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.manager.worker_liveness import (
    LivenessAction,
    LivenessChanged,
    LivenessEvent,
    LivenessRules,
    LivenessState,
    LivenessTick,
    StreamRefused,
    WorkerArrived,
    WorkerLiveness,
    WorkerRemoved,
    WorkerReported,
    WorkerStreamEnded,
)

ALIVE, SUSPECT, OFFLINE, FORGOTTEN = (
    LivenessState.ALIVE,
    LivenessState.SUSPECT,
    LivenessState.OFFLINE,
    LivenessState.FORGOTTEN,
)
RULES = LivenessRules(suspect_s=2, offline_s=5, reconnect_s=1, forget_s=60, flapping_s=30, max_tick_s=1)
FIRST, SECOND = "1000-aa", "2000-bb"


class Bed:
    """A WorkerLiveness that is called twice a second."""

    def __init__(self, rules: LivenessRules = RULES) -> None:
        self.now = 0.0
        self.lives = WorkerLiveness(rules, self.now)

    def do(self, event: LivenessEvent) -> list[LivenessAction]:
        return self.lives.handle(event, self.now)

    def wait(self, seconds: float, *beating: tuple[str, int]) -> list[LivenessAction]:
        found: list[LivenessAction] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for worker_id, stream in beating:
                found += self.do(WorkerReported(worker_id, stream))
            found += self.do(LivenessTick())
        return found


def states(actions: list[LivenessAction]) -> list[tuple[LivenessState, bool]]:
    return [(action.state, action.is_open) for action in actions if isinstance(action, LivenessChanged)]


def refused(actions: list[LivenessAction]) -> list[int]:
    return [action.stream for action in actions if isinstance(action, StreamRefused)]


def test_a_silent_worker_is_suspect_then_offline_then_forgotten() -> None:
    bed = Bed()
    assert states(bed.do(WorkerArrived("w", FIRST, 1))) == [(ALIVE, True)]
    assert bed.wait(20, ("w", 1)) == []
    assert bed.wait(1.5) == []
    assert states(bed.wait(0.5)) == [(SUSPECT, False)]
    assert bed.wait(2.5) == []
    assert states(bed.wait(0.5)) == [(OFFLINE, False)]
    assert bed.lives.compute_silent_s("w") == 5
    assert bed.wait(59.5) == []
    assert bed.lives.get_records().keys() == {"w"}
    assert bed.lives.get("w") is bed.lives.get_records()["w"]
    actions = bed.wait(0.5)
    assert states(actions) == [(FORGOTTEN, False)]
    assert refused(actions) == [1]
    assert bed.lives.get("w") is None


def test_default_rules_have_the_documented_times() -> None:
    bed = Bed(LivenessRules())
    bed.do(WorkerArrived("silent", FIRST, 1))
    bed.do(WorkerArrived("ended", FIRST, 2))
    assert states(bed.do(WorkerStreamEnded("ended", 2))) == [(SUSPECT, False)]
    assert bed.wait(1.5) == []
    assert [(action.worker_id, action.state) for action in bed.wait(0.5) if isinstance(action, LivenessChanged)] == [
        ("silent", SUSPECT),
        ("ended", OFFLINE),
    ]
    assert bed.wait(2.5) == []
    assert states(bed.wait(0.5)) == [(OFFLINE, False)]
    assert states(bed.wait(3596.5)) == []
    actions = bed.wait(0.5)
    assert (states(actions), refused(actions)) == ([(FORGOTTEN, False)], [])
    silent_s = bed.lives.compute_silent_s("silent")
    bed.now += 600
    bed.do(LivenessTick())
    assert bed.lives.compute_silent_s("silent") == silent_s + 1


def test_an_offline_worker_that_reports_again_is_alive_on_its_old_stream() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    assert states(bed.wait(10)) == [(SUSPECT, False), (OFFLINE, False)]
    assert states(bed.do(WorkerReported("w", 1))) == [(ALIVE, True)]
    assert bed.wait(5, ("w", 1)) == []


def test_a_worker_whose_connection_ended_is_offline_soon_unless_it_reconnects() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    bed.do(WorkerArrived("v", FIRST, 2))
    assert states(bed.do(WorkerStreamEnded("w", 1))) == [(SUSPECT, False)]
    assert states(bed.do(WorkerStreamEnded("v", 2))) == [(SUSPECT, False)]
    assert bed.wait(0.5) == []
    actions = bed.do(WorkerArrived("v", FIRST, 3))
    assert (states(actions), refused(actions)) == ([(ALIVE, True)], [])
    assert [action for action in bed.wait(0.5, ("v", 3)) if isinstance(action, LivenessChanged)] == [
        LivenessChanged("w", OFFLINE, False, "no report for 1.0 s")
    ]


def test_a_suspect_worker_whose_connection_ends_is_offline_after_the_reconnect_time() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    assert states(bed.wait(2)) == [(SUSPECT, False)]
    assert bed.do(WorkerStreamEnded("w", 1)) == []
    assert bed.wait(0.5) == []
    assert states(bed.wait(0.5)) == [(OFFLINE, False)]
    actions = bed.wait(60)
    assert (states(actions), refused(actions)) == ([(FORGOTTEN, False)], [])


def test_a_worker_that_leaves_is_forgotten_at_once() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    assert states(bed.do(WorkerStreamEnded("w", 1, has_left=True))) == [(FORGOTTEN, False)]
    assert states(bed.do(WorkerArrived("w", SECOND, 2))) == [(ALIVE, True)]


def test_an_old_stream_cannot_end_a_new_one() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    assert bed.do(WorkerArrived("w", FIRST, 1)) == []
    (action,) = bed.do(WorkerArrived("w", FIRST, 2))
    assert isinstance(action, StreamRefused)
    assert (action.stream, action.is_name_taken) == (1, False)
    assert bed.do(WorkerStreamEnded("w", 1)) == []
    assert bed.do(WorkerStreamEnded("w", 1, has_left=True)) == []
    assert bed.do(WorkerReported("w", 1)) == []
    assert refused(bed.do(WorkerArrived("w", FIRST, 1))) == [1]
    assert states(bed.wait(2.5, ("w", 1))) == [(SUSPECT, False)]  # reports of the old stream do not count


def test_a_later_process_replaces_an_earlier_one_permanently() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    bed.do(WorkerStreamEnded("w", 1))
    assert states(bed.do(WorkerArrived("w", SECOND, 2))) == [(ALIVE, True)]
    assert refused(bed.do(WorkerArrived("w", FIRST, 3))) == [3]
    bed.do(WorkerStreamEnded("w", 2))
    bed.wait(3)
    assert refused(bed.do(WorkerArrived("w", FIRST, 4))) == [4]  # nor when the later one is gone
    assert states(bed.do(WorkerArrived("w", SECOND, 5))) == [(ALIVE, True)]


def test_the_last_sixteen_replaced_processes_are_remembered() -> None:
    bed = Bed()
    for number in range(18):
        bed.do(WorkerArrived("w", f"p{number}", number))
        bed.do(WorkerStreamEnded("w", number))
    assert refused(bed.do(WorkerArrived("w", "p1", 18))) == [18]
    assert refused(bed.do(WorkerArrived("w", "p0", 19))) == []


def test_a_second_process_of_the_same_name_is_refused_while_the_first_is_alive() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    (action,) = bed.do(WorkerArrived("w", SECOND, 2))
    assert isinstance(action, StreamRefused)
    assert action.stream == 2
    assert action.is_name_taken
    assert "--node" in action.reason
    assert bed.do(WorkerStreamEnded("w", 2)) == []
    assert bed.wait(10, ("w", 1)) == []
    assert states(bed.wait(2.5)) == [(SUSPECT, False)]  # its host was cut off, or lost its power
    actions = bed.do(WorkerArrived("w", SECOND, 3))
    assert refused(actions) == [1]
    assert states(actions) == [(ALIVE, True)]


def test_time_in_which_the_manager_did_not_run_does_not_count_as_silence() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    bed.now += 600
    assert bed.do(LivenessTick()) == []
    assert bed.do(WorkerReported("w", 1)) == []
    assert not bed.lives.is_settled


def test_liveness_is_settled_after_every_worker_had_time_to_connect() -> None:
    bed = Bed()
    bed.wait(4.5)
    assert not bed.lives.is_settled
    bed.wait(0.5)
    assert bed.lives.is_settled


def test_a_flapping_worker_gets_nothing_new_until_it_has_stayed() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    seen = []
    for stream in range(2, 5):
        bed.do(WorkerStreamEnded("w", stream - 1))
        bed.wait(2)
        seen += states(bed.do(WorkerArrived("w", FIRST, stream)))
    assert seen == [(ALIVE, True), (ALIVE, True), (ALIVE, False)]
    assert bed.wait(29.5, ("w", 4)) == []
    assert states(bed.wait(1, ("w", 4))) == [(ALIVE, True)]


@pytest.mark.parametrize(("wait_s", "is_open"), [(14.5, False), (15, True)])
def test_three_returns_are_flapping_only_within_the_flapping_time(wait_s: float, is_open: bool) -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", "0-x", 0))
    actions: list[LivenessAction] = []
    for stream, pause_s in ((1, 40.0), (2, 15.0), (3, wait_s)):
        bed.wait(pause_s, ("w", stream - 1))
        bed.do(WorkerStreamEnded("w", stream - 1))
        actions = bed.do(WorkerArrived("w", f"{stream}-x", stream))
    (action,) = actions
    assert isinstance(action, LivenessChanged)
    assert (action.state, action.is_open) == (ALIVE, is_open)
    assert ("for 30 s" in action.reason) is not is_open


def test_by_default_three_returns_within_a_minute_are_flapping() -> None:
    bed = Bed(LivenessRules())
    bed.do(WorkerArrived("w", "0-x", 0))
    seen = []
    for stream in range(1, 5):
        bed.wait(30, ("w", stream - 1))
        bed.do(WorkerStreamEnded("w", stream - 1))
        seen += states(bed.do(WorkerArrived("w", f"{stream}-x", stream)))
    assert seen == [(ALIVE, True)] * 4


def test_a_worker_whose_process_restarts_again_and_again_is_flapping() -> None:
    bed = Bed()
    seen = []
    for stream in range(1, 5):
        seen += states(bed.do(WorkerArrived("w", f"{stream}-x", stream)))
        bed.wait(0.5)
        bed.do(WorkerStreamEnded("w", stream))
    assert seen == [(ALIVE, True), (ALIVE, True), (ALIVE, True), (ALIVE, False)]


def test_short_losses_of_the_connection_are_not_flapping() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    for stream in range(2, 9):
        bed.do(WorkerStreamEnded("w", stream - 1))
        assert states(bed.do(WorkerArrived("w", FIRST, stream))) == [(ALIVE, True)]


def test_a_removed_worker_is_forgotten_and_its_stream_ended() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    actions = bed.do(WorkerRemoved("w"))
    assert states(actions) == [(FORGOTTEN, False)]
    assert refused(actions) == [1]
    assert bed.do(WorkerRemoved("w")) == []
    bed.do(WorkerArrived("w", FIRST, 1))
    bed.do(WorkerStreamEnded("w", 1))
    actions = bed.do(WorkerRemoved("w"))
    assert (states(actions), refused(actions)) == ([(FORGOTTEN, False)], [])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.floats(0, 3)), max_size=60))
def test_only_the_newest_stream_counts_in_any_order_of_events(script: list[tuple[int, int, float]]) -> None:
    bed = Bed()
    stream, ended = 0, set[int]()
    for kind, incarnation, pause in script:
        bed.now += pause
        before = bed.lives.get("w")
        match kind:
            case 0:
                stream += 1
                actions = bed.do(WorkerArrived("w", f"{incarnation}-x", stream))
            case 1:
                actions = bed.do(WorkerReported("w", stream - incarnation))
            case 2:
                actions = bed.do(WorkerStreamEnded("w", stream - incarnation))
            case 3:
                actions = bed.do(WorkerRemoved("w"))
            case _:
                actions = bed.do(LivenessTick())
        life = bed.lives.get("w")
        assert not ended & set(refused(actions))  # no worker is disconnected twice
        ended |= set(refused(actions))
        assert life is None or life.stream not in ended
        assert not (life is not None and life.is_open and life.state is not ALIVE)
        assert kind or before is None or life is not None
