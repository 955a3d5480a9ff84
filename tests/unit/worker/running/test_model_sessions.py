"""A block's sessions on a worker: scripts of events with a fake clock."""

from math import inf

from penstock.core.requests import SessionStep
from penstock.worker.running.model_sessions import ModelSessions


def run(sessions: ModelSessions, step: SessionStep, now: float) -> tuple[bool, bool]:
    """Run one job of the session to its answer; return whether the session is new, and whether it restarts."""
    sessions.enter(step.session_id)
    start = sessions.start(step)
    if step.is_end:
        sessions.end(step.session_id)
    sessions.leave(step.session_id, now)
    return start


def test_a_session_is_new_once() -> None:
    sessions = ModelSessions(10.0)
    assert run(sessions, SessionStep("s"), 0.0) == (True, False)
    assert run(sessions, SessionStep("s"), 1.0) == (False, False)
    assert run(sessions, SessionStep("t"), 1.0) == (True, False)


def test_a_restarted_session_is_new_and_the_old_one_ends() -> None:
    sessions = ModelSessions(10.0)
    assert run(sessions, SessionStep("s", is_start=True), 0.0) == (True, False)
    assert run(sessions, SessionStep("s", is_start=True), 1.0) == (True, True)


def test_an_ended_session_is_forgotten_and_can_start_again() -> None:
    sessions = ModelSessions(10.0)
    run(sessions, SessionStep("s", is_start=True), 0.0)
    run(sessions, SessionStep("s", is_end=True), 1.0)
    assert len(sessions) == 0
    assert sessions.next_due() == inf
    assert run(sessions, SessionStep("s", is_start=True), 2.0) == (True, False)


def test_idle_sessions_end_after_their_time() -> None:
    sessions = ModelSessions(10.0)
    run(sessions, SessionStep("s"), 0.0)
    run(sessions, SessionStep("t"), 3.0)
    run(sessions, SessionStep("s"), 5.0)
    assert sessions.next_due() == 13.0
    assert sessions.expire(12.9) == []
    assert sessions.expire(13.0) == ["t"]
    assert sessions.next_due() == 15.0
    assert sessions.expire(99.0) == ["s"]
    assert (len(sessions), sessions.next_due()) == (0, inf)


def test_a_session_with_a_waiting_or_running_job_is_not_idle() -> None:
    sessions = ModelSessions(10.0)
    run(sessions, SessionStep("s"), 0.0)
    sessions.enter("s")
    assert sessions.expire(99.0) == []
    assert sessions.start(SessionStep("s")) == (False, False)
    sessions.enter("s")
    sessions.leave("s", 99.0)
    assert sessions.next_due() == inf
    sessions.leave("s", 100.0)
    assert sessions.next_due() == 110.0


def test_a_job_that_never_ran_leaves_nothing_behind() -> None:
    sessions = ModelSessions(10.0)
    sessions.enter("s")
    sessions.leave("s", 1.0)
    assert len(sessions) == 0
    assert sessions.clear() == []


def test_a_session_whose_end_was_not_reported_is_forgotten() -> None:
    sessions = ModelSessions(10.0)
    sessions.enter("s")
    sessions.start(SessionStep("s", is_end=True))
    sessions.leave("s", 1.0)  # cancelled while it ran
    sessions.end("s")
    assert (len(sessions), sessions.next_due()) == (0, inf)


def test_the_restarted_session_can_wait_while_the_old_one_ends() -> None:
    sessions = ModelSessions(10.0)
    sessions.enter("s")
    sessions.enter("s")
    sessions.start(SessionStep("s", is_end=True))
    sessions.end("s")
    sessions.leave("s", 1.0)
    assert sessions.start(SessionStep("s", is_start=True)) == (True, False)


def test_all_sessions_of_the_model_end_when_the_block_is_unloaded() -> None:
    sessions = ModelSessions(10.0)
    run(sessions, SessionStep("idle"), 0.0)
    sessions.enter("running")
    sessions.start(SessionStep("running"))
    sessions.enter("waiting")
    assert sessions.clear() == ["idle", "running"]
    assert sessions.clear() == []
    sessions.leave("running", 1.0)
    assert sessions.start(SessionStep("waiting")) == (True, False)
