"""Which processes hang: scripts of beats, turns and used CPU."""

import pytest

from penstock.manager.fleet.liveness import Hang, Liveness, Look

TURN_S = 0.5


class Watch:
    """Turns every half second; processes that beat do so after each turn."""

    def __init__(self) -> None:
        self.liveness = Liveness(hang_s=5.0, loop_hang_s=30.0)
        self.now = 100.0
        self.cpu_s = {"a": 0.0, "b": 0.0}
        self.liveness.turn(self.now, self.looks())
        for name in self.cpu_s:
            self.liveness.started(name)

    def looks(self, **states: str) -> dict[str, Look]:
        return {name: Look(cpu_s, states.get(name, "sleeping")) for name, cpu_s in self.cpu_s.items()}

    def turn(
        self, seconds: float, *beating: str, loop_s: float | None = 0.0, working: str = "", **states: str
    ) -> list[Hang]:
        """Until somebody hangs, or so many seconds are over."""
        for _ in range(round(seconds / TURN_S)):
            self.now += TURN_S
            if working:
                self.cpu_s[working] += TURN_S
            if found := self.liveness.turn(self.now, self.looks(**states)):
                return found
            for name in beating:
                self.liveness.beaten(name, loop_s)
        return []


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    watch.turn(1, "a", "b")
    return watch


def test_who_beats_lives(watch: Watch) -> None:
    assert watch.turn(3600, "a", "b") == []


def test_who_neither_beats_nor_works_hangs_after_hang_s(watch: Watch) -> None:
    assert watch.turn(4.5, "b") == []
    assert watch.turn(TURN_S, "b") == [Hang("a", "silent", 5.0)]


def test_a_beat_starts_the_count_anew(watch: Watch) -> None:
    for _ in range(10):
        assert watch.turn(4, "b") == []
        assert watch.turn(TURN_S, "a", "b") == []


def test_who_works_is_not_dead_until_loop_hang_s(watch: Watch) -> None:
    """A thread that does not get the interpreter cannot beat."""
    assert watch.turn(29.5, "b", working="a") == []
    assert watch.turn(TURN_S, "b", working="a") == [Hang("a", "silent", 30.0)]


def test_who_worked_at_first_and_then_stopped_hangs(watch: Watch) -> None:
    assert watch.turn(10, "b", working="a") == []
    assert watch.turn(4.5, "b") == []
    assert watch.turn(TURN_S, "b") == [Hang("a", "silent", 15.0)]


def test_a_loop_that_does_not_turn_hangs_after_loop_hang_s(watch: Watch) -> None:
    assert watch.turn(1, "a", "b", loop_s=29.5) == []
    assert [hang.why for hang in watch.turn(1, "a", "b", loop_s=30.0)] == ["loop", "loop"]


def test_who_has_not_spoken_yet_gets_the_longer_time() -> None:
    watch = Watch()
    assert watch.turn(29.5, "b") == []
    assert watch.turn(TURN_S, "b") == [Hang("a", "silent", 30.0)]


def test_who_has_no_loop_yet_gets_the_longer_time() -> None:
    """Imports take long on a machine that has much to do."""
    watch = Watch()
    watch.turn(3600, "a", "b", loop_s=None)
    assert watch.turn(29.5, "b") == []
    assert watch.turn(TURN_S, "b") == [Hang("a", "silent", 30.0)]


@pytest.mark.parametrize("state", ["running", "disk-sleep"])
def test_who_waits_for_the_machine_does_not_hang(watch: Watch, state: str) -> None:
    assert watch.turn(29.5, "b", a=state) == []
    assert watch.turn(TURN_S, "b", a=state) == [Hang("a", "silent", 30.0)]


@pytest.mark.parametrize("state", ["stopped", "tracing-stop", "sleeping"])
def test_other_states_are_of_its_own(watch: Watch, state: str) -> None:
    assert [hang.name for hang in watch.turn(5, "b", a=state)] == ["a"]


@pytest.mark.parametrize("asleep_s", [10.0, 3600.0, 1e6])
def test_when_the_watcher_slept_nobody_hangs(watch: Watch, asleep_s: float) -> None:
    """A container that was paused, a machine that was suspended: all wake together."""
    assert watch.turn(3, "b") == []
    watch.now += asleep_s
    assert watch.liveness.turn(watch.now, watch.looks()) == []
    assert watch.turn(3600, "a", "b") == []


def test_a_watcher_that_slept_still_finds_who_stopped(watch: Watch) -> None:
    watch.now += 3600
    assert watch.liveness.turn(watch.now, watch.looks()) == []
    assert [hang.name for hang in watch.turn(5, "b")] == ["a"]


def test_who_ended_is_not_watched_and_comes_anew(watch: Watch) -> None:
    watch.liveness.ended("a")
    assert watch.turn(60, "b") == []
    watch.liveness.beaten("a", 0.0)  # its last words
    watch.liveness.started("a")
    assert watch.turn(29, "b") == []
    watch.turn(TURN_S, "a", "b")
    assert [hang.name for hang in watch.turn(5, "b")] == ["a"]


def test_who_is_stopped_before_its_loop_turns_is_not_starting() -> None:
    watch = Watch()
    watch.turn(1, "a", "b", loop_s=None)
    assert watch.turn(4.5, "b", loop_s=None, a="stopped") == []
    assert watch.turn(TURN_S, "b", loop_s=None, a="stopped") == [Hang("a", "silent", 5.0)]
