"""Detection of hanging processes by scripts of heartbeats, loop turns and used CPU time."""

import pytest

from penstock.manager.fleet.process_liveness import Hang, ProcessLiveness, ProcessSample

TICK_S = 0.5


class Watch:
    """Checks every half second; live processes send a heartbeat after each check."""

    def __init__(self) -> None:
        self.liveness = ProcessLiveness(hang_s=5.0, loop_hang_s=30.0)
        self.now = 100.0
        self.cpu_s = {"a": 0.0, "b": 0.0}
        self.liveness.tick(self.now, self.looks())
        for name in self.cpu_s:
            self.liveness.record_start(name)

    def looks(self, **states: str) -> dict[str, ProcessSample]:
        return {name: ProcessSample(cpu_s, states.get(name, "sleeping")) for name, cpu_s in self.cpu_s.items()}

    def turn(
        self, seconds: float, *beating: str, loop_s: float | None = 0.0, working: str = "", **states: str
    ) -> list[Hang]:
        """Check until a process hangs, or for this many seconds."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            if working:
                self.cpu_s[working] += TICK_S
            if found := self.liveness.tick(self.now, self.looks(**states)):
                return found
            for name in beating:
                self.liveness.record_heartbeat(name, loop_s)
        return []


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    watch.turn(1, "a", "b")
    return watch


def test_a_process_with_heartbeats_is_alive(watch: Watch) -> None:
    assert watch.turn(3600, "a", "b") == []


def test_a_process_without_heartbeats_and_work_hangs_after_hang_s(watch: Watch) -> None:
    assert watch.turn(4.5, "b") == []
    assert watch.turn(TICK_S, "b") == [Hang("a", "silent", 5.0)]


def test_a_heartbeat_restarts_the_count(watch: Watch) -> None:
    for _ in range(10):
        assert watch.turn(4, "b") == []
        assert watch.turn(TICK_S, "a", "b") == []


def test_a_working_process_is_not_dead_until_loop_hang_s(watch: Watch) -> None:
    """A thread that does not get the interpreter cannot send heartbeats."""
    assert watch.turn(29.5, "b", working="a") == []
    assert watch.turn(TICK_S, "b", working="a") == [Hang("a", "silent", 30.0)]


def test_a_process_that_worked_and_then_stopped_hangs(watch: Watch) -> None:
    assert watch.turn(10, "b", working="a") == []
    assert watch.turn(4.5, "b") == []
    assert watch.turn(TICK_S, "b") == [Hang("a", "silent", 15.0)]


def test_a_process_whose_loop_does_not_run_hangs_after_loop_hang_s(watch: Watch) -> None:
    assert watch.turn(1, "a", "b", loop_s=29.5) == []
    assert [hang.kind for hang in watch.turn(1, "a", "b", loop_s=30.0)] == ["loop", "loop"]


def test_a_process_without_a_first_heartbeat_gets_the_longer_time() -> None:
    watch = Watch()
    assert watch.turn(29.5, "b") == []
    assert watch.turn(TICK_S, "b") == [Hang("a", "silent", 30.0)]


def test_a_process_without_a_loop_yet_gets_the_longer_time() -> None:
    """Imports take long on a busy machine."""
    watch = Watch()
    watch.turn(3600, "a", "b", loop_s=None)
    assert watch.turn(29.5, "b") == []
    assert watch.turn(TICK_S, "b") == [Hang("a", "silent", 30.0)]


@pytest.mark.parametrize("state", ["running", "disk-sleep"])
def test_a_process_that_waits_for_the_machine_does_not_hang(watch: Watch, state: str) -> None:
    assert watch.turn(29.5, "b", a=state) == []
    assert watch.turn(TICK_S, "b", a=state) == [Hang("a", "silent", 30.0)]


@pytest.mark.parametrize("state", ["stopped", "tracing-stop", "sleeping"])
def test_a_process_in_another_state_hangs(watch: Watch, state: str) -> None:
    assert [hang.name for hang in watch.turn(5, "b", a=state)] == ["a"]


@pytest.mark.parametrize("asleep_s", [10.0, 3600.0, 1e6])
def test_no_process_hangs_after_the_watcher_slept(watch: Watch, asleep_s: float) -> None:
    """After a paused container or a suspended machine, all processes wake together."""
    assert watch.turn(3, "b") == []
    watch.now += asleep_s
    assert watch.liveness.tick(watch.now, watch.looks()) == []
    assert watch.turn(3600, "a", "b") == []


def test_a_watcher_that_slept_still_finds_stopped_processes(watch: Watch) -> None:
    watch.now += 3600
    assert watch.liveness.tick(watch.now, watch.looks()) == []
    assert [hang.name for hang in watch.turn(5, "b")] == ["a"]


def test_an_ended_process_is_not_watched_and_can_start_again(watch: Watch) -> None:
    watch.liveness.record_end("a")
    assert watch.turn(60, "b") == []
    watch.liveness.record_heartbeat("a", 0.0)  # its last heartbeat
    watch.liveness.record_start("a")
    assert watch.turn(29, "b") == []
    watch.turn(TICK_S, "a", "b")
    assert [hang.name for hang in watch.turn(5, "b")] == ["a"]


def test_a_process_stopped_before_its_loop_runs_is_not_starting() -> None:
    watch = Watch()
    watch.turn(1, "a", "b", loop_s=None)
    assert watch.turn(4.5, "b", loop_s=None, a="stopped") == []
    assert watch.turn(TICK_S, "b", loop_s=None, a="stopped") == [Hang("a", "silent", 5.0)]
