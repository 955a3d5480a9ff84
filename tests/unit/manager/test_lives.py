"""The lives of workers, by scripts of events: silence, returns, processes that take each other's place, flapping."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.manager.lives import (
    LifeAction,
    LifeChanged,
    LifeEvent,
    LifeRules,
    LifeState,
    Lives,
    LivesTurn,
    StreamRefused,
    WorkerArrived,
    WorkerHeard,
    WorkerRemoved,
    WorkerStreamEnded,
)

ALIVE, SUSPECT, OFFLINE, FORGOTTEN = LifeState.ALIVE, LifeState.SUSPECT, LifeState.OFFLINE, LifeState.FORGOTTEN
RULES = LifeRules(suspect_s=2, offline_s=5, reconnect_s=1, forget_s=60, flapping_s=30, most_turn_s=1)
FIRST, SECOND = "1000-aa", "2000-bb"


class Bed:
    """Turns twice a second, as its owner does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lives = Lives(RULES, self.now)

    def do(self, event: LifeEvent) -> list[LifeAction]:
        return self.lives.handle(event, self.now)

    def wait(self, seconds: float, *beating: tuple[str, int]) -> list[LifeAction]:
        found: list[LifeAction] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for worker_id, stream in beating:
                found += self.do(WorkerHeard(worker_id, stream))
            found += self.do(LivesTurn())
        return found


def states(actions: list[LifeAction]) -> list[tuple[LifeState, bool]]:
    return [(action.state, action.is_open) for action in actions if isinstance(action, LifeChanged)]


def refused(actions: list[LifeAction]) -> list[int]:
    return [action.stream for action in actions if isinstance(action, StreamRefused)]


def test_who_is_silent_is_suspect_then_offline_then_forgotten() -> None:
    bed = Bed()
    assert states(bed.do(WorkerArrived("w", FIRST, 1))) == [(ALIVE, True)]
    assert bed.wait(20, ("w", 1)) == []
    assert states(bed.wait(2.5)) == [(SUSPECT, False)]
    assert states(bed.wait(3)) == [(OFFLINE, False)]
    actions = bed.wait(61)
    assert states(actions) == [(FORGOTTEN, False)]
    assert refused(actions) == [1]
    assert bed.lives.get("w") is None


def test_one_that_was_stopped_for_a_while_is_taken_back_on_its_old_stream() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    assert states(bed.wait(10)) == [(SUSPECT, False), (OFFLINE, False)]
    assert states(bed.do(WorkerHeard("w", 1))) == [(ALIVE, True)]
    assert bed.wait(5, ("w", 1)) == []


def test_one_whose_connection_ended_is_offline_soon_unless_it_calls_again() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    bed.do(WorkerArrived("v", FIRST, 2))
    assert states(bed.do(WorkerStreamEnded("w", 1))) == [(SUSPECT, False)]
    assert states(bed.do(WorkerStreamEnded("v", 2))) == [(SUSPECT, False)]
    bed.wait(0.5)
    assert states(bed.do(WorkerArrived("v", FIRST, 3))) == [(ALIVE, True)]
    assert [action for action in bed.wait(1, ("v", 3)) if isinstance(action, LifeChanged)] == [
        LifeChanged("w", OFFLINE, False, "silent for 1.0 s")
    ]


def test_one_that_says_goodbye_is_forgotten_at_once() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    assert states(bed.do(WorkerStreamEnded("w", 1, has_left=True))) == [(FORGOTTEN, False)]
    assert states(bed.do(WorkerArrived("w", SECOND, 2))) == [(ALIVE, True)]


def test_an_old_stream_cannot_undo_a_new_one() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    assert refused(bed.do(WorkerArrived("w", FIRST, 2))) == [1]
    assert bed.do(WorkerStreamEnded("w", 1)) == []
    assert bed.do(WorkerStreamEnded("w", 1, has_left=True)) == []
    assert bed.do(WorkerHeard("w", 1)) == []
    assert refused(bed.do(WorkerArrived("w", FIRST, 1))) == [1]
    assert states(bed.wait(2.5, ("w", 1))) == [(SUSPECT, False)]  # what the old one says is not heard


def test_a_later_process_takes_the_place_of_an_earlier_which_does_not_come_back() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    bed.do(WorkerStreamEnded("w", 1))
    assert states(bed.do(WorkerArrived("w", SECOND, 2))) == [(ALIVE, True)]
    assert refused(bed.do(WorkerArrived("w", FIRST, 3))) == [3]
    bed.do(WorkerStreamEnded("w", 2))
    bed.wait(3)
    assert refused(bed.do(WorkerArrived("w", FIRST, 4))) == [4]  # nor when the later one is gone
    assert states(bed.do(WorkerArrived("w", SECOND, 5))) == [(ALIVE, True)]


def test_a_second_of_the_same_name_is_refused_while_the_first_is_heard() -> None:
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


def test_the_managers_own_absence_is_nobodys_silence() -> None:
    bed = Bed()
    bed.do(WorkerArrived("w", FIRST, 1))
    bed.now += 600
    assert bed.do(LivesTurn()) == []
    assert bed.do(WorkerHeard("w", 1)) == []
    assert not bed.lives.is_settled


def test_a_manager_knows_who_is_missing_when_all_had_time_to_call() -> None:
    bed = Bed()
    bed.wait(4.5)
    assert not bed.lives.is_settled
    bed.wait(0.5)
    assert bed.lives.is_settled


def test_one_that_comes_and_goes_gets_nothing_new_until_it_has_stayed() -> None:
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


def test_a_process_that_is_started_again_and_again_comes_and_goes_too() -> None:
    bed = Bed()
    seen = []
    for stream in range(1, 5):
        seen += states(bed.do(WorkerArrived("w", f"{stream}-x", stream)))
        bed.wait(0.5)
        bed.do(WorkerStreamEnded("w", stream))
    assert seen == [(ALIVE, True), (ALIVE, True), (ALIVE, True), (ALIVE, False)]


def test_one_whose_connection_breaks_for_a_moment_did_not_go() -> None:
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.floats(0, 3)), max_size=60))
def test_only_the_newest_stream_speaks_whatever_happens(script: list[tuple[int, int, float]]) -> None:
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
                actions = bed.do(WorkerHeard("w", stream - incarnation))
            case 2:
                actions = bed.do(WorkerStreamEnded("w", stream - incarnation))
            case 3:
                actions = bed.do(WorkerRemoved("w"))
            case _:
                actions = bed.do(LivesTurn())
        life = bed.lives.get("w")
        assert not ended & set(refused(actions))  # nobody is sent away twice
        ended |= set(refused(actions))
        assert life is None or life.stream not in ended
        assert not (life is not None and life.is_open and life.state is not ALIVE)
        assert kind or before is None or life is not None
