"""The start, restart, end, idle time and loss of sessions."""

import pytest

from penstock.core.errors import (
    Draining,
    EngineFailed,
    InvalidTensor,
    ModelNotReady,
    Overloaded,
    QueueFull,
    SessionError,
    WorkerLost,
)
from tests.unit.features.sessions.session_script import Sent, response

# --- start reports to the worker


def test_the_worker_gets_the_start_mark_until_its_model_has_seen_the_session() -> None:
    sent = Sent()
    is_start: list[bool] = []
    for outcome in (QueueFull("full"), InvalidTensor("bad"), None, None):
        sent.send(1 if len(is_start) < 2 else len(is_start))
        is_start.append(sent.running[0].parameters.is_start)
        sent.finish(outcome)
    assert is_start == [True, True, True, False]


def test_a_failed_model_has_seen_the_session() -> None:
    sent = Sent()
    sent.send(1)
    sent.finish(EngineFailed("no"))
    sent.send(2)
    assert not sent.running[0].parameters.is_start


# --- starts and ends


def test_a_session_counts_from_its_start() -> None:
    sent = Sent()
    sent.send(7, start=True)
    sent.finish()
    sent.send(8)
    assert sent.numbers() == [8]
    with pytest.raises(SessionError, match="started with seq_no 7: there is no seq_no 6"):
        sent.send(6)


def test_steps_that_arrive_before_the_start_wait_for_it() -> None:
    sent = Sent(window=4)
    early = sent.send(5)
    before = sent.send(2)
    start = sent.send(3, start=True)
    assert "was started with seq_no 3" in sent.error(before, SessionError)
    sent.finish()
    assert sent.table.count_waiting_steps() == 1
    sent.send(4)
    sent.finish()
    sent.finish()
    assert (sent.text(start), sent.text(early)) == ("3", "5")


def test_a_start_restarts_a_live_session() -> None:
    sent = Sent()
    for number in (1, 2):
        sent.send(number)
        sent.finish()
    waiting = sent.send(4)
    restarted = sent.send(1, start=True, digest=b"x")
    assert "was restarted" in sent.error(waiting, SessionError)
    assert sent.running[0].parameters.is_start
    sent.finish(response("new 1"))
    assert (sent.text(restarted), sent.given[restarted].position) == ("new 1", 1)
    sent.send(2)
    sent.finish(response("new 2"))
    assert sent.text(sent.send(2)) == "new 2"  # not the answer from before the restart


def test_a_restarted_session_waits_for_running_steps_from_before() -> None:
    sent = Sent()
    sent.send(1)
    sent.finish()
    old = sent.send(2)
    new = sent.send(2, start=True, digest=b"x")
    assert len(sent.running) == 1
    same = sent.send(2, start=True, digest=b"x")
    sent.finish(response("old"))
    assert sent.text(old) == "old"
    assert len(sent.running) == 1
    sent.finish(response("new"))
    assert sent.text(new) == sent.text(same) == "new"


def test_without_numbers_each_start_restarts_the_session() -> None:
    sent = Sent()
    first = sent.send(start=True)
    waiting = sent.send()
    second = sent.send(start=True)
    assert "was restarted" in sent.error(waiting, SessionError)
    sent.finish(response("old"))
    sent.finish(response("new"))
    assert (sent.text(first), sent.text(second)) == ("old", "new")
    assert sent.given[second].position == 1


def test_a_repeated_start_is_recognized() -> None:
    sent = Sent()
    first, again = sent.send(1, start=True, digest=b"x"), sent.send(1, start=True, digest=b"x")
    waiting = sent.send(3)
    sent.finish(QueueFull("full"))
    assert sent.error(first, QueueFull)
    assert sent.error(again, QueueFull)
    open_again = sent.send(1, start=True, digest=b"y")  # nothing ran: it may be a different one
    sent.finish()
    assert sent.text(open_again) == "1"
    done_again = sent.send(1, start=True, digest=b"y")
    assert sent.given[done_again].is_repeat
    assert waiting not in sent.given
    sent.send(1, start=True, digest=b"z")  # with other inputs it is a different start
    assert "was restarted" in sent.error(waiting, SessionError)
    assert sent.numbers() == [1]


def test_a_start_after_further_steps_restarts_the_session() -> None:
    sent = Sent()
    sent.send(1, start=True, digest=b"x")
    sent.finish()
    sent.send(2)
    restarted = sent.send(1, start=True, digest=b"x")
    sent.finish()
    sent.finish(response("restarted"))
    assert sent.text(restarted) == "restarted"


def test_an_ended_session_answers_repeats_and_refuses_new_steps() -> None:
    sent = Sent()
    beyond = sent.send(3)
    sent.send(1)
    sent.finish()
    sent.send(2, end=True)
    sent.finish()
    assert "has ended" in sent.error(beyond, SessionError)
    assert sent.table.count_open_sessions() == 0
    assert sent.text(sent.send(2)) == "2"
    with pytest.raises(SessionError, match="has ended: restart it with sequence_start"):
        sent.send(3)
    sent.send(1, start=True)
    sent.finish(response("restarted"))
    assert sent.text(sent.send(1)) == "restarted"


def test_a_failed_last_step_that_can_be_repeated_does_not_end_the_session() -> None:
    sent = Sent()
    sent.send(1, end=True)
    sent.finish(QueueFull("full"))
    sent.send(1, end=True)
    sent.finish()
    with pytest.raises(SessionError, match="has ended"):
        sent.send(2)


def test_without_numbers_an_ended_session_needs_a_start() -> None:
    sent = Sent()
    sent.send(start=True, end=True)
    sent.finish()
    with pytest.raises(SessionError, match="has ended"):
        sent.send()
    sent.send(start=True)
    assert len(sent.running) == 1


# --- idle sessions, and too many


def test_idle_sessions_are_forgotten() -> None:
    sent = Sent(idle_s=10)
    sent.send(1)
    sent.finish()
    sent.send(1, "busy")
    sent.tick(5.0)
    sent.send(1)  # a repeat counts as activity
    sent.tick(14.9)
    assert sent.table.count_open_sessions() == 2
    sent.tick(15.0)
    assert sent.table.count_open_sessions() == 1
    again = sent.send(1)
    sent.finish()
    assert not sent.given[again].is_repeat


def test_recorded_answers_end_with_their_session() -> None:
    sent = Sent(idle_s=10)
    kept = sent.table._answers
    for number in (1, 2):
        sent.send(number)
        sent.finish()
    sent.send(1, start=True, digest=b"x")
    assert (len(kept), kept.size_bytes) == (0, 0)
    sent.finish()
    sent.send(1, block="other")
    sent.finish()
    assert len(kept) == 2
    sent.perform(sent.table.retire_block("other", ModelNotReady("unloaded")))
    assert len(kept) == 1
    sent.tick(10.0)
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_a_session_that_never_ran_is_forgotten() -> None:
    sent = Sent()
    sent.leave(sent.send(2))
    sent.send(1, "t")
    sent.finish(QueueFull("full"), "t")
    assert sent.table.count_open_sessions() == 0


def test_ended_sessions_are_evicted_first_and_then_the_longest_idle() -> None:
    sent = Sent(max_sessions=3)
    for at, (name, end) in enumerate({"old": False, "new": False, "ended": True}.items()):
        sent.now = at
        sent.send(1, name, end=end)
        sent.finish(session=name)
    assert sent.send(1, "old") in sent.given  # it was used again, so the other one is idle for longer
    for name in ("x", "y"):
        sent.send(1, name)
    assert sent.send(1, "old") in sent.given  # still there
    sent.send(1, "z")
    assert sorted(step.session.session_id for step in sent.running) == ["x", "y", "z"]
    with pytest.raises(Overloaded, match="3 sessions"):
        sent.send(1, "too many")


# --- state that is lost with a worker


def test_a_stateful_session_is_lost_with_its_worker() -> None:
    sent = Sent(is_stateful=True)
    sent.send(1)
    sent.finish()
    second, waiting = sent.send(2), sent.send(3)
    sent.finish(WorkerLost("died"))
    assert sent.error(second, WorkerLost)
    assert "its worker is gone and with it the model's state" in sent.error(waiting, SessionError)
    with pytest.raises(SessionError, match="restart it with sequence_start"):
        sent.send(2)
    assert sent.text(sent.send(1)) == "1"
    assert sent.table.count_open_sessions() == 0
    sent.send(1, start=True)
    assert sent.running[0].parameters.is_start


def test_an_idle_stateful_session_is_lost_with_its_worker() -> None:
    sent = Sent(is_stateful=True)
    for name, home in (("a", b"gone"), ("b", b"here")):
        sent.send(1, name)
        sent.finish(session=name, home=home)
    sent.send(1, "not yet")  # its model has no state
    waiting = sent.send(3, "a")
    sent.perform(sent.table.worker_lost(b"gone", ["blk", "unknown"], sent.now))
    assert "its worker is gone" in sent.error(waiting, SessionError)
    assert sent.send(2, "b") not in sent.given
    with pytest.raises(SessionError, match="is lost"):
        sent.send(2, "a")
    sent.finish(session="not yet")
    sent.send(2, "not yet")
    assert len(sent.running) == 2


def test_an_idle_session_without_state_is_not_lost() -> None:
    sent = Sent()
    sent.send(1)
    sent.finish(home=b"gone")
    sent.perform(sent.table.worker_lost(b"gone", ["blk"], sent.now))
    sent.send(2)
    assert sent.running[0].parameters.home == b"gone"  # the router finds another worker and reports it
    sent.finish(home=b"here")
    sent.send(3)
    assert sent.running[0].parameters.home == b"here"


def test_a_worker_that_leaves_right_after_its_answer_loses_the_state() -> None:
    sent = Sent(is_stateful=True)
    first = sent.send(1)
    sent.running[0].parameters.home = b"gone"  # the router has its answer, the table does not yet
    sent.perform(sent.table.worker_lost(b"gone", ["blk"], sent.now))
    sent.finish(home=b"gone")
    assert sent.text(first) == "1"
    with pytest.raises(SessionError, match="is lost"):
        sent.send(2)


def test_a_restarted_session_is_not_lost_with_its_former_worker() -> None:
    sent = Sent(is_stateful=True)
    sent.send(1)
    sent.finish(home=b"gone")
    sent.send(2)
    restarted = sent.send(1, start=True, digest=b"x")
    sent.perform(sent.table.worker_lost(b"gone", ["blk"], sent.now))
    sent.finish(WorkerLost("died"))
    sent.finish(response("new"), home=b"here")
    assert sent.text(restarted) == "new"


def test_the_first_step_of_a_stateful_session_can_be_sent_again() -> None:
    sent = Sent(is_stateful=True)
    sent.send(1)
    sent.finish(WorkerLost("died"))
    sent.send(1)
    assert sent.running[0].parameters.is_start


def test_a_session_without_state_continues_with_another_worker() -> None:
    sent = Sent()
    sent.send(1)
    sent.finish()
    sent.send(2)
    sent.finish(WorkerLost("died"))
    sent.send(2)
    assert sent.numbers() == [2]


# --- removal of the block or the server


def test_sessions_end_with_their_block() -> None:
    sent = Sent()
    running, waiting = sent.send(1), sent.send(2)
    sent.perform(sent.table.retire_block("blk", ModelNotReady("unloaded")))
    assert sent.error(waiting, ModelNotReady) == "unloaded"
    assert sent.table.count_open_sessions() == sent.table.count_waiting_steps() == 0
    sent.finish()
    assert sent.text(running) == "1"
    assert sent.table.count_open_sessions() == 0


def test_sessions_continue_with_the_replacing_version() -> None:
    sent = Sent()
    for number in (1, 2):
        sent.send(number, "done")
        sent.finish(session="done")
    running, waiting = sent.send(1, "busy"), sent.send(2, "busy")
    sent.perform(sent.table.retire_block("blk", ModelNotReady("unloaded"), ("new", sent.settings), 0.0))
    assert (sent.table.count_open_sessions(), sent.table.count_waiting_steps()) == (2, 1)
    sent.finish(session="busy")
    assert sent.text(running) == "1"
    sent.finish(ModelNotReady("unloaded"), session="busy")
    assert sent.error(waiting, ModelNotReady), "the caller sends the request to the new version"
    sent.send(2, "busy", block="new")
    sent.send(3, "done", block="new")
    assert sent.numbers() == [2, 3]
    sent.finish(session="busy")
    sent.finish(session="done")
    again = sent.send(2, "done", block="new")
    assert sent.text(again) == "2", "the session's answers are kept"


def test_sessions_of_a_stateful_model_end_with_their_version() -> None:
    sent = Sent(is_stateful=True)
    sent.send(1)
    sent.finish()
    sent.send(2)
    waiting = sent.send(3)
    sent.perform(sent.table.retire_block("blk", ModelNotReady("unloaded"), ("new", sent.settings), 0.0))
    assert "another version has replaced the model" in sent.error(waiting, SessionError)
    sent.finish()
    with pytest.raises(SessionError, match="restart it with sequence_start"):
        sent.send(3, block="new")
    sent.send(1, start=True, block="new")
    assert sent.numbers() == [1]


def test_a_draining_server_finishes_requests_that_can_run() -> None:
    sent = Sent()
    vain = sent.send(2, "a")
    running, following, missing = sent.send(1, "b"), sent.send(2, "b"), sent.send(4, "b")
    sent.perform(sent.table.drain())
    assert sent.error(vain, Draining)
    with pytest.raises(Draining):
        sent.send(3, "b")
    sent.finish(session="b")
    sent.finish(session="b")
    assert (sent.text(running), sent.text(following)) == ("1", "2")
    assert sent.error(missing, Draining)
    assert sent.running == []


def test_a_closing_server_starts_nothing_more() -> None:
    sent = Sent()
    sent.send(1)
    waiting = sent.send(2)
    sent.perform(sent.table.close())
    assert sent.error(waiting, Draining)
    sent.finish()
    assert sent.running == []
