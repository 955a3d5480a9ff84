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
from penstock.features.sessions.lifecycle import MAX_WAITING_REPEATS
from penstock.features.sessions.session_answers import OVERHEAD_BYTES
from penstock.features.sessions.session_table import SessionTable
from tests.unit.features.sessions.session_script import Sent, response

# --- order


def test_steps_run_one_at_a_time_in_the_order_of_their_numbers() -> None:
    sent = Sent()
    third, second = sent.send(3), sent.send(2)
    assert sent.numbers() == []
    assert sent.table.count_waiting_steps() == 2
    first = sent.send(1)
    assert sent.numbers() == [1]
    sent.finish()
    assert sent.numbers() == [2]
    sent.finish()
    sent.finish()
    assert [sent.text(ticket) for ticket in (first, second, third)] == ["1", "2", "3"]
    assert [sent.given[ticket].position for ticket in (first, second, third)] == [1, 2, 3]
    assert sent.table.count_waiting_steps() == 0


def test_sessions_and_blocks_do_not_wait_for_each_other() -> None:
    sent = Sent()
    sent.send(1, "a")
    sent.send(1, "b")
    sent.send(1, "a", block="other")
    assert len(sent.running) == 3


def test_without_numbers_steps_run_in_order_of_arrival() -> None:
    sent = Sent()
    tickets = [sent.send() for _ in range(4)]
    sent.leave(tickets[1])
    sent.finish()
    sent.finish(QueueFull("full"))  # delays no other step: without a number it cannot be sent again
    sent.finish()
    assert sent.text(tickets[0]) == "1"
    assert sent.error(tickets[2], QueueFull)
    assert sent.text(tickets[3]) == "4"
    assert [sent.given[tickets[n]].position for n in (0, 3)] == [1, 2]
    sent.send()
    assert len(sent.running) == 1


def test_numbered_and_unnumbered_steps_cannot_be_mixed() -> None:
    sent = Sent()
    sent.send(1)
    with pytest.raises(SessionError, match="came with seq_no"):
        sent.send()
    sent.send(session="t")
    with pytest.raises(SessionError, match="came without seq_no"):
        sent.send(1, "t")


def test_the_error_for_a_step_too_far_ahead_names_the_awaited_one() -> None:
    sent = Sent(window=2)
    sent.send(3)
    with pytest.raises(
        SessionError,
        match=r"seq_no 4 of session 's' is more than 2 ahead of the next expected one: send seq_no 1 first",
    ):
        sent.send(4)
    with pytest.raises(SessionError, match="send seq_no 1"):
        sent.send(4, "new")
    assert sent.table.count_open_sessions() == 1
    sent.send(1)
    sent.finish()
    sent.send(4)


def test_without_numbers_the_window_limits_waiting_steps() -> None:
    sent = Sent(window=2)
    for _ in range(3):
        sent.send()
    with pytest.raises(SessionError, match="2 requests of session 's' already wait"):
        sent.send()


# --- deadlines and callers that leave


def test_the_error_of_a_step_past_its_deadline_names_the_missing_number() -> None:
    sent = Sent()
    late, patient = sent.send(3, deadline=5.0), sent.send(2, deadline=50.0)
    assert sent.table.find_next_deadline() == 5.0
    sent.tick(4.9)
    assert sent.given == {}
    sent.tick(5.0)
    assert "seq_no 3 of session 's' waited for seq_no 1" in sent.error(late, DeadlineExceeded)
    assert patient not in sent.given
    assert sent.table.count_waiting_steps() == 1
    sent.send(1)
    sent.finish()
    sent.finish()
    assert sent.text(patient) == "2"
    assert sent.numbers() == []  # nobody waits for step 3 any more


def test_without_numbers_the_deadline_applies_too() -> None:
    sent = Sent()
    sent.send()
    late = sent.send(deadline=1.0)
    sent.tick(1.0)
    assert "an earlier one of session 's'" in sent.error(late, DeadlineExceeded)


def test_a_run_has_the_latest_deadline_of_its_callers() -> None:
    sent = Sent()
    hasty, patient = sent.send(2, deadline=5.0), sent.send(2, deadline=9.0)
    sent.send(1)
    sent.finish()
    assert sent.running[0].deadline == 9.0
    sent.tick(5.0)
    assert "while the request was running" in sent.error(hasty, DeadlineExceeded)
    sent.tick(9.0)  # the run itself has that deadline and will report
    assert patient not in sent.given
    sent.finish(DeadlineExceeded("late"))
    assert sent.error(patient, DeadlineExceeded) == "late"


def test_a_second_caller_of_a_running_step_gets_an_error_at_its_own_deadline() -> None:
    sent = Sent()
    first = sent.send(1, deadline=9.0)
    hasty = sent.send(1, deadline=5.0)
    sent.tick(5.0)
    assert "while the request was running" in sent.error(hasty, DeadlineExceeded)
    sent.finish()
    assert sent.text(first) == "1"


def test_a_waiting_step_is_removed_with_its_caller() -> None:
    sent = Sent()
    leaver = sent.send(2)
    sent.send(1)
    sent.leave(leaver)
    sent.finish()
    assert sent.numbers() == []
    again = sent.send(2)
    sent.finish()
    assert sent.text(again) == "2"


def test_a_running_step_continues_without_its_caller_and_its_answer_is_found_later() -> None:
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


def test_runs_without_callers_are_cancelled_beyond_the_limit() -> None:
    sent = Sent(SessionTable(max_abandoned_bytes=100))
    for name, size in (("a", 60), ("b", 40), ("c", 1)):
        sent.leave(sent.send(1, name, size=size))
    (stopped,) = sent.stopped
    assert stopped.session.session_id == "c"
    sent.finish(Overloaded("given up"), "c")
    again = sent.send(1, "a")  # a caller waits for it again, so there is room
    sent.leave(sent.send(1, "d", size=60))
    assert len(sent.stopped) == 1
    sent.finish(session="a")
    assert not sent.given[again].is_repeat


# --- repeats


def test_a_repeated_step_that_runs_or_waits_runs_once() -> None:
    sent = Sent()
    tickets = [sent.send(seq_no) for seq_no in (2, 2, 1, 1)]
    assert sent.numbers() == [1]
    sent.finish()
    sent.finish()
    assert sent.running == []
    assert [sent.text(ticket) for ticket in tickets] == ["2", "2", "1", "1"]
    assert not any(given.is_repeat for given in sent.given.values())


def test_a_finished_step_is_answered_from_the_record() -> None:
    sent = Sent(answers=2)
    for number in (1, 2, 3):
        sent.send(number)
        sent.finish()
    again = sent.send(2)
    assert (sent.text(again), sent.given[again].position, sent.given[again].is_repeat) == ("2", 2, True)
    assert sent.table.repeats == 1
    with pytest.raises(SessionError, match=r"seq_no 1 of session 's' was answered before, .* send seq_no 4"):
        sent.send(1)


def test_recorded_answers_are_limited_in_bytes_over_all_sessions() -> None:
    sent = Sent(SessionTable(max_answer_bytes=2 * OVERHEAD_BYTES + 100))
    for name in ("a", "b", "c"):
        sent.send(1, name)
        sent.finish(response(name, size=40), name)
    with pytest.raises(SessionError, match="no longer stored"):
        sent.send(1, "a")
    assert [sent.text(sent.send(1, name)) for name in ("b", "c")] == ["b", "c"]


def test_a_session_that_keeps_no_answers_still_keeps_its_order() -> None:
    sent = Sent(answers=0)
    sent.send(2)
    sent.send(1)
    sent.finish()
    assert sent.numbers() == [2]
    with pytest.raises(SessionError, match="no longer stored"):
        sent.send(1)


@pytest.mark.parametrize("kind", [InvalidTensor, EngineFailed])
def test_a_fault_of_the_caller_or_the_model_is_recorded_as_an_answer(kind: type[PenstockError]) -> None:
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
def test_after_any_other_failure_a_step_can_be_repeated(kind: type[PenstockError]) -> None:
    sent = Sent()
    waiting = sent.send(2)
    first, sharer = sent.send(1), sent.send(1)
    sent.finish(kind("no"))
    assert sent.error(first, kind) == sent.error(sharer, kind) == "no"
    assert sent.numbers() == []
    assert sent.table.count_waiting_steps() == 1
    again = sent.send(1)
    sent.finish()
    sent.finish()
    assert (sent.text(again), sent.text(waiting)) == ("1", "2")
    assert [sent.given[ticket].position for ticket in (again, waiting)] == [1, 2]


# --- limits on waiting steps


def test_the_number_of_waiting_steps_is_limited() -> None:
    sent = Sent(SessionTable(max_waiting=3))
    waiting = [sent.send(2, f"s{number}") for number in range(3)]
    with pytest.raises(Overloaded, match="3 requests of sessions already wait"):
        sent.send(2, "s3")
    assert sent.table.count_open_sessions() == 3  # the refused step left nothing behind
    sent.send(1, "s3")  # runs at once and needs no room
    sent.leave(waiting[0])
    sent.send(2, "s4")
    with pytest.raises(Overloaded):
        sent.send(2, "s5")
    sent.send(1, "s4")
    sent.finish(session="s4")  # its second step runs now, and does not wait
    sent.send(2, "s5")


def test_the_bytes_of_waiting_steps_are_limited() -> None:
    sent = Sent(SessionTable(max_waiting_bytes=100))
    sent.send(2, "a", size=1000)  # a single step may wait, whatever its size
    with pytest.raises(Overloaded):
        sent.send(2, "b", size=1)
    sent.send(1, "a")
    sent.finish(session="a")
    sent.send(2, "b", size=60)
    sent.send(2, "c", size=40)
    with pytest.raises(Overloaded):
        sent.send(2, "d", size=1)


def test_repeats_of_one_waiting_step_are_limited() -> None:
    sent = Sent(window=2)
    tickets = [sent.send(2) for _ in range(2 + MAX_WAITING_REPEATS)]
    with pytest.raises(SessionError, match="66 requests of session 's' already wait"):
        sent.send(2)
    sent.send(2, "other")
    sent.send(1)
    sent.finish()
    sent.finish()
    assert {sent.text(ticket) for ticket in tickets} == {"2"}
    sent.send(4)


def test_a_repeat_of_a_running_step_counts_as_waiting() -> None:
    sent = Sent(SessionTable(max_waiting=2))
    sent.send(1)
    again = [sent.send(1) for _ in range(2)]
    with pytest.raises(Overloaded):
        sent.send(1)
    sent.finish()
    assert {sent.text(ticket) for ticket in again} == {"1"}
    sent.send(1)  # answered from the record
    sent.send(3)
    sent.send(4)
    with pytest.raises(Overloaded):
        sent.send(5)
    sent.send(2, start=True)  # restarts at once
    assert sent.numbers() == [2]


def test_a_refused_start_of_a_busy_session_affects_no_other_session() -> None:
    sent = Sent(SessionTable(max_waiting=1))
    sent.send(1)
    waiting = sent.send(2)
    with pytest.raises(Overloaded):
        sent.send(1, start=True, digest=b"other")
    assert waiting not in sent.given
