"""The session table: one step at a time, in order, once."""

import pytest

from penstock.core.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidTensor,
    ModelNotReady,
    Overloaded,
    PenstockError,
    QueueFull,
    SessionError,
    WorkerLost,
)
from penstock.serving.sessions.answers import OVERHEAD_BYTES
from penstock.serving.sessions.lives import SENT_AGAIN
from penstock.serving.sessions.table import SessionTable
from tests.unit.serving.sessions.session_script import Sent, response

# --- order


def test_steps_run_one_at_a_time_in_the_order_of_their_numbers() -> None:
    sent = Sent()
    third, second = sent.send(3), sent.send(2)
    assert sent.numbers() == []
    assert sent.table.waiting_steps() == 2
    first = sent.send(1)
    assert sent.numbers() == [1]
    sent.finish()
    assert sent.numbers() == [2]
    sent.finish()
    sent.finish()
    assert [sent.text(ticket) for ticket in (first, second, third)] == ["1", "2", "3"]
    assert [sent.given[ticket].position for ticket in (first, second, third)] == [1, 2, 3]
    assert sent.table.waiting_steps() == 0


def test_sessions_and_blocks_do_not_wait_for_each_other() -> None:
    sent = Sent()
    sent.send(1, "a")
    sent.send(1, "b")
    sent.send(1, "a", block="other")
    assert len(sent.running) == 3


def test_without_numbers_the_order_is_that_of_arrival() -> None:
    sent = Sent()
    tickets = [sent.send() for _ in range(4)]
    sent.leave(tickets[1])
    sent.finish()
    sent.finish(QueueFull("full"))  # holds up nobody: there is no number to send it again by
    sent.finish()
    assert sent.text(tickets[0]) == "1"
    assert sent.error(tickets[2], QueueFull)
    assert sent.text(tickets[3]) == "4"
    assert [sent.given[tickets[n]].position for n in (0, 3)] == [1, 2]
    sent.send()
    assert len(sent.running) == 1


def test_the_two_ways_do_not_mix_in_one_session() -> None:
    sent = Sent()
    sent.send(1)
    with pytest.raises(SessionError, match="has requests with seq_no"):
        sent.send()
    sent.send(session="t")
    with pytest.raises(SessionError, match="has requests without seq_no"):
        sent.send(1, "t")


def test_a_step_too_far_ahead_is_told_which_is_awaited() -> None:
    sent = Sent(window=2)
    sent.send(3)
    with pytest.raises(SessionError, match=r"seq_no 4 of session 's' is more than 2 ahead .*: seq_no 1 is awaited"):
        sent.send(4)
    with pytest.raises(SessionError, match="seq_no 1 is awaited"):
        sent.send(4, "new")
    assert sent.table.open_sessions() == 1
    sent.send(1)
    sent.finish()
    sent.send(4)


def test_without_numbers_as_many_wait_as_the_window_has() -> None:
    sent = Sent(window=2)
    for _ in range(3):
        sent.send()
    with pytest.raises(SessionError, match="2 requests of session 's' wait already"):
        sent.send()


# --- deadlines and callers that leave


def test_who_waits_past_its_deadline_hears_what_it_waited_for() -> None:
    sent = Sent()
    late, patient = sent.send(3, deadline=5.0), sent.send(2, deadline=50.0)
    assert sent.table.due() == 5.0
    sent.tick(4.9)
    assert sent.given == {}
    sent.tick(5.0)
    assert "seq_no 3 of session 's' waited for seq_no 1" in sent.error(late, DeadlineExceeded)
    assert patient not in sent.given
    assert sent.table.waiting_steps() == 1
    sent.send(1)
    sent.finish()
    sent.finish()
    assert sent.text(patient) == "2"
    assert sent.numbers() == []  # nobody wants step 3 any more


def test_without_numbers_the_deadline_holds_as_well() -> None:
    sent = Sent()
    sent.send()
    late = sent.send(deadline=1.0)
    sent.tick(1.0)
    assert "an earlier one of session 's'" in sent.error(late, DeadlineExceeded)


def test_a_run_has_as_long_as_the_most_patient_of_those_who_wait_for_it() -> None:
    sent = Sent()
    hasty, patient = sent.send(2, deadline=5.0), sent.send(2, deadline=9.0)
    sent.send(1)
    sent.finish()
    assert sent.running[0].deadline == 9.0
    sent.tick(5.0)
    assert "while the request was running" in sent.error(hasty, DeadlineExceeded)
    sent.tick(9.0)  # the run itself has that deadline and will tell
    assert patient not in sent.given
    sent.finish(DeadlineExceeded("late"))
    assert sent.error(patient, DeadlineExceeded) == "late"


def test_who_joins_a_running_step_with_less_time_than_it_has_is_told_in_time() -> None:
    sent = Sent()
    first = sent.send(1, deadline=9.0)
    hasty = sent.send(1, deadline=5.0)
    sent.tick(5.0)
    assert "while the request was running" in sent.error(hasty, DeadlineExceeded)
    sent.finish()
    assert sent.text(first) == "1"


def test_a_caller_that_leaves_before_its_step_ran_takes_it_along() -> None:
    sent = Sent()
    leaver = sent.send(2)
    sent.send(1)
    sent.leave(leaver)
    sent.finish()
    assert sent.numbers() == []
    again = sent.send(2)
    sent.finish()
    assert sent.text(again) == "2"


def test_a_step_goes_on_without_its_caller_and_its_answer_is_found_later() -> None:
    sent = Sent()
    leaver = sent.send(1)
    sent.leave(leaver)
    sharer = sent.send(1)
    sent.leave(sharer)
    sent.finish()
    assert sent.given == {}
    again = sent.send(1)
    assert sent.text(again) == "1"
    assert sent.given[again].is_repeat
    assert sent.numbers() == []


def test_too_much_that_runs_for_nobody_is_given_up() -> None:
    sent = Sent(SessionTable(max_abandoned_bytes=100))
    for name, size in (("a", 60), ("b", 40), ("c", 1)):
        sent.leave(sent.send(1, name, size=size))
    (stopped,) = sent.stopped
    assert stopped.session.session_id == "c"
    sent.finish(Overloaded("given up"), "c")
    again = sent.send(1, "a")  # somebody waits for it again, so there is room
    sent.leave(sent.send(1, "d", size=60))
    assert len(sent.stopped) == 1
    sent.finish(session="a")
    assert not sent.given[again].is_repeat


# --- sent again


def test_a_step_that_is_sent_again_while_it_runs_or_waits_runs_once() -> None:
    sent = Sent()
    tickets = [sent.send(seq_no) for seq_no in (2, 2, 1, 1)]
    assert sent.numbers() == [1]
    sent.finish()
    sent.finish()
    assert sent.running == []
    assert [sent.text(ticket) for ticket in tickets] == ["2", "2", "1", "1"]
    assert not any(given.is_repeat for given in sent.given.values())


def test_a_step_that_is_done_is_answered_from_the_record() -> None:
    sent = Sent(answers=2)
    for number in (1, 2, 3):
        sent.send(number)
        sent.finish()
    again = sent.send(2)
    assert (sent.text(again), sent.given[again].position, sent.given[again].is_repeat) == ("2", 2, True)
    assert sent.table.repeats == 1
    with pytest.raises(SessionError, match=r"seq_no 1 of session 's' was answered, .* seq_no 4 is awaited"):
        sent.send(1)


def test_answers_are_bounded_in_bytes_over_all_sessions() -> None:
    sent = Sent(SessionTable(max_answer_bytes=2 * OVERHEAD_BYTES + 100))
    for name in ("a", "b", "c"):
        sent.send(1, name)
        sent.finish(response(name, size=40), name)
    with pytest.raises(SessionError, match="no longer kept"):
        sent.send(1, "a")
    assert [sent.text(sent.send(1, name)) for name in ("b", "c")] == ["b", "c"]


def test_a_session_that_keeps_no_answers_still_keeps_its_order() -> None:
    sent = Sent(answers=0)
    sent.send(2)
    sent.send(1)
    sent.finish()
    assert sent.numbers() == [2]
    with pytest.raises(SessionError, match="no longer kept"):
        sent.send(1)


@pytest.mark.parametrize("kind", [InvalidTensor, EngineFailed])
def test_the_callers_or_the_models_fault_is_an_answer(kind: type[PenstockError]) -> None:
    sent = Sent()
    waiting = sent.send(2)
    first = sent.send(1)
    sent.finish(kind("no"))
    assert sent.error(first, kind) == "no"
    assert sent.numbers() == [2]
    again = sent.send(1)
    assert sent.error(again, kind) == "no"
    assert sent.given[again].is_repeat
    sent.finish()
    assert sent.given[waiting].position == 2


@pytest.mark.parametrize("kind", [QueueFull, ModelNotReady, WorkerLost, DeadlineExceeded])
def test_any_other_failure_leaves_the_step_open(kind: type[PenstockError]) -> None:
    sent = Sent()
    waiting = sent.send(2)
    first, sharer = sent.send(1), sent.send(1)
    sent.finish(kind("no"))
    assert sent.error(first, kind) == sent.error(sharer, kind) == "no"
    assert sent.numbers() == []
    assert sent.table.waiting_steps() == 1
    again = sent.send(1)
    sent.finish()
    sent.finish()
    assert (sent.text(again), sent.text(waiting)) == ("1", "2")
    assert [sent.given[ticket].position for ticket in (again, waiting)] == [1, 2]


# --- room to wait


def test_what_waits_in_all_sessions_is_bounded_in_number() -> None:
    sent = Sent(SessionTable(max_waiting=3))
    waiting = [sent.send(2, f"s{number}") for number in range(3)]
    with pytest.raises(Overloaded, match="3 requests wait in sessions"):
        sent.send(2, "s3")
    assert sent.table.open_sessions() == 3  # nothing is left of the one that was refused
    sent.send(1, "s3")  # runs at once: that needs no room
    sent.leave(waiting[0])
    sent.send(2, "s4")
    with pytest.raises(Overloaded):
        sent.send(2, "s5")
    sent.send(1, "s4")
    sent.finish(session="s4")  # its second runs now, and waits no more
    sent.send(2, "s5")


def test_what_waits_in_all_sessions_is_bounded_in_bytes() -> None:
    sent = Sent(SessionTable(max_waiting_bytes=100))
    sent.send(2, "a", size=1000)  # one alone may wait, whatever its size
    with pytest.raises(Overloaded):
        sent.send(2, "b", size=1)
    sent.send(1, "a")
    sent.finish(session="a")
    sent.send(2, "b", size=60)
    sent.send(2, "c", size=40)
    with pytest.raises(Overloaded):
        sent.send(2, "d", size=1)


def test_what_waits_in_one_session_is_bounded_though_it_is_the_same_step_again_and_again() -> None:
    sent = Sent(window=2)
    tickets = [sent.send(2) for _ in range(2 + SENT_AGAIN)]
    with pytest.raises(SessionError, match="66 requests of session 's' wait already"):
        sent.send(2)
    sent.send(2, "other")
    sent.send(1)
    sent.finish()
    sent.finish()
    assert {sent.text(ticket) for ticket in tickets} == {"2"}
    sent.send(4)


def test_who_asks_for_a_step_that_runs_waits_too() -> None:
    sent = Sent(SessionTable(max_waiting=2))
    sent.send(1)
    again = [sent.send(1) for _ in range(2)]
    with pytest.raises(Overloaded):
        sent.send(1)
    sent.finish()
    assert {sent.text(ticket) for ticket in again} == {"1"}
    sent.send(1)  # is answered from what is kept
    sent.send(3)
    sent.send(4)
    with pytest.raises(Overloaded):
        sent.send(5)
    sent.send(2, start=True)  # begins anew at once
    assert sent.numbers() == [2]


def test_a_refused_start_of_a_busy_session_refuses_nobody_else() -> None:
    sent = Sent(SessionTable(max_waiting=1))
    sent.send(1)
    waiting = sent.send(2)
    with pytest.raises(Overloaded):
        sent.send(1, start=True, digest=b"other")
    assert waiting not in sent.given
