"""The session table: the running, waiting and answered steps of each session. Pure: no I/O.

A session is a sequence of steps, of which one runs at a time. A step is one request, identified by its seq_no or by
its order of arrival. Each caller of a step has a ticket for its outcome; a repeat of the request gets another ticket.

A step waits until its number is next, runs, and ends with an outcome. A conclusive outcome (an answer, or an error that
a repeat would give again) is remembered for repeats and advances the session; after any other error the step may be
sent again. A session starts with its first step and is idle between steps. It is over when a step asked for its end
(ENDED), when the worker with its model's state is gone (LOST), or when another version replaced its block (REPLACED).

A session is removed when it was idle for too long, or when it moves to another gateway. To move it, `owners_changed` or
`start_transfer` stop new steps, `remove` returns the record once no step runs, and `insert` adds the record at the next
owner.
"""

from collections.abc import Callable, Iterable, Iterator
from math import inf

from penstock.core.errors import CONCLUSIVE_ERRORS, EngineFailed, PenstockError, SessionError, WorkerLost
from penstock.core.requests import SessionStep
from penstock.core.settings import Sessions
from penstock.features.sessions import session_errors
from penstock.features.sessions.lifecycle import SessionLifecycle
from penstock.features.sessions.session import (
    Action,
    BlockSessions,
    DeliverOutcome,
    Session,
    SessionRecord,
    StartStep,
    Step,
    StopStep,
    Ticket,
    WaitingLimit,
)
from penstock.features.sessions.session_answers import Outcome, RememberedAnswers
from penstock.features.sessions.session_errors import ENDED, LOST, REPLACED
from penstock.router.deadlines import Deadlines

MAX_ANSWER_BYTES = 256 * 1024 * 1024  # remembered answers of all sessions
MAX_ABANDONED_BYTES = 64 * 1024 * 1024  # of requests that run although all of their callers left
SESSION_SHARE = 0.25  # share of the limit on waiting bytes that one session may use


class SessionTable:
    """All ordered sessions of a gateway.

    An event takes O(1) time, apart from the heap of deadlines; the end, restart or move of a session takes time in
    proportion to its waiting steps.
    """

    def __init__(
        self,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        max_abandoned_bytes: int = MAX_ABANDONED_BYTES,
        max_waiting: float = inf,
        max_waiting_bytes: float = inf,
        first_life: int = 0,
    ) -> None:
        self._blocks: dict[str, BlockSessions] = {}
        self._answers = RememberedAnswers(max_answer_bytes)
        self._lifecycle = SessionLifecycle(self._answers, max_waiting_bytes * SESSION_SHARE, first_life)
        self._room = WaitingLimit(max_waiting, max_waiting_bytes)
        self._deadlines = Deadlines(_may_outlive_caller)
        self._abandoned_bytes = 0
        self._max_abandoned_bytes = max_abandoned_bytes
        self._is_draining = False
        self.repeats = 0

    def count_open_sessions(self) -> int:
        return sum(len(block.sessions) - len(block.over) for block in self._blocks.values())

    def count_waiting_steps(self) -> int:
        return sum(block.waiting for block in self._blocks.values())

    def find_next_deadline(self) -> float | None:
        """Return the earliest time at which `tick` may have to fail a step, or None."""
        return self._deadlines.peek_time()

    # --- events

    def add_request(self, ticket: Ticket, now: float) -> list[Action]:
        """Add a caller's request: answer it, start its step, or let it wait.

        Raise SessionError, Overloaded or Draining without adding the ticket.
        """
        if self._is_draining:
            raise session_errors.make_draining_error()
        asked = ticket.parameters
        assert asked.seq_no is None or asked.seq_no >= 1, f"seq_no {asked.seq_no}"
        block = self._blocks.get(ticket.block_id)
        if block is None:
            block = self._blocks[ticket.block_id] = BlockSessions(ticket.settings)
        block.settings = ticket.settings
        session = block.sessions.get(asked.session_id)
        if session is not None and session.is_moving:
            raise session_errors.make_session_moved_error(session)
        if _would_wait(session, asked):
            self._check_room(session, ticket.size_bytes)
        actions: list[Action] = []
        if session is None:
            session = self._lifecycle.open(block, ticket)
        elif asked.is_start:
            actions = self._lifecycle.restart_or_repeat(session, ticket)
            session = block.sessions[asked.session_id]
        if session.is_numbered != (asked.seq_no is not None):
            raise session_errors.make_mixed_numbering_error(session)
        number = session.arrived + 1 if asked.seq_no is None else asked.seq_no
        if number < session.next:
            return [*actions, self._repeat_answer(session, ticket, number, now)]
        if session.over:
            raise SessionError(f"{session} {session.over}")
        return [*actions, *self._join_step(session, ticket, number)]

    def finish_step(self, step: Step, outcome: Outcome, now: float) -> list[Action]:
        session = step.session
        assert session.running is step, f"{session} does not run step {step.number}"
        session.running = None
        self._abandoned_bytes -= step.abandoned_bytes
        actions: list[Action] = [*step.deliver(outcome)]
        if step.life == session.life:
            actions += self._conclude_step(session, step, outcome)
        return actions + self._advance_session(session, now)

    def find(self, block_id: str, session_id: str) -> Session | None:
        block = self._blocks.get(block_id)
        return None if block is None else block.sessions.get(session_id)

    def list_session_keys(self) -> list[tuple[str, str]]:
        return [(block_id, name) for block_id, block in self._blocks.items() for name in block.sessions]

    def owners_changed(self, is_own: Callable[[str], bool]) -> list[Action]:
        """Handle a change of gateways: fail waiting steps of sessions with other owners. Running steps finish here."""
        actions: list[Action] = []
        for session in self._iterate_sessions():
            session.is_moving = not is_own(session.session_id)
            if session.is_moving:
                actions += session.fail_waiting(session.waiting, session_errors.make_session_moved_error(session))
        return actions

    def start_transfer(self, session: Session) -> list[Action]:
        """Accept no more steps of a session that moves to another gateway. Call `remove` when no step runs."""
        session.is_moving = True
        return [*session.fail_waiting(session.waiting, session_errors.make_session_moved_error(session))]

    def remove(self, session: Session) -> SessionRecord:
        """Remove an idle session and return its record."""
        assert session.running is None, f"{session} runs"
        assert not session.waiting, f"{session} has waiting steps"
        record = self._lifecycle.make_record(session)
        if session.is_in_table:
            self._lifecycle.remove(session)
        return record

    def insert(
        self, block_id: str, settings: Sessions, session_id: str, record: SessionRecord, epoch: int, now: float
    ) -> None:
        """Add a session that another gateway had. Raise Overloaded if there are too many sessions."""
        block = self._blocks.setdefault(block_id, BlockSessions(settings))
        assert session_id not in block.sessions, f"session '{session_id}' exists"
        block.settings = settings
        self._lifecycle.make_room(block)
        self._lifecycle.mark_idle(self._lifecycle.insert(block, session_id, record, epoch), now)

    def caller_left(self, ticket: Ticket, now: float) -> list[Action]:
        """Remove the ticket of a caller who left or got the outcome. A running step continues, for later repeats."""
        return [] if ticket.step is None else self._remove_ticket(ticket, ticket.step, now)

    def worker_lost(self, worker: bytes, block_ids: Iterable[str], now: float) -> list[Action]:
        """End the sessions whose model state was on a worker that no longer holds these blocks."""
        actions: list[Action] = []
        for block in [self._blocks[block_id] for block_id in block_ids if block_id in self._blocks]:
            if not block.settings.is_stateful:
                continue
            for session in [*block.sessions.values()]:
                if session.find_state_worker() == worker and not session.over:
                    block.mark_busy(session)
                    actions += self._end_session(session, LOST)
                    self._lifecycle.mark_idle(session, now)
        return actions

    def retire_block(
        self, block_id: str, error: PenstockError, successor: tuple[str, Sessions] | None = None, now: float = 0.0
    ) -> list[Action]:
        """Remove a withdrawn block. Its sessions continue on its successor, except sessions whose state a model held.

        Without a successor, waiting steps fail. Running steps still end in either case.
        """
        block = self._blocks.pop(block_id, None)
        if block is None:
            return []
        to = None if successor is None else self._blocks.setdefault(successor[0], BlockSessions(successor[1]))
        actions: list[Action] = []
        for session in list(block.sessions.values()):
            if to is None or session.session_id in to.sessions:
                actions += session.fail_waiting(session.waiting, error)
                self._lifecycle.forget_answers(session)
                session.life, session.is_in_table = 0, False
                continue
            to.sessions[session.session_id] = session
            session.block = to
            to.waiting += len(session.waiting)
            if not session.over and (block.settings.is_stateful or to.settings.is_stateful):
                actions += self._end_session(session, REPLACED)
            self._lifecycle.mark_idle(session, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fail the waiting requests whose deadlines have passed, and remove sessions that were idle for too long."""
        actions: list[Action] = []
        while (ticket := self._deadlines.pop(now)) is not None:
            assert ticket.step is not None
            late = DeliverOutcome(ticket, session_errors.make_step_deadline_error(ticket.step))
            actions += [*self._remove_ticket(ticket, ticket.step, now), late]
        for block in self._blocks.values():
            for session in block.iterate_idle_since(now - block.settings.idle_s):
                self._lifecycle.remove(session)
        return actions

    def drain(self) -> list[Action]:
        """Accept no more requests, and fail steps that wait for an earlier request that has not arrived."""
        self._is_draining = True
        return self._fail_waiting_steps(session for session in self._iterate_sessions() if session.running is None)

    def close(self) -> list[Action]:
        """Accept no more requests, and fail all waiting steps."""
        self._is_draining = True
        return self._fail_waiting_steps(self._iterate_sessions())

    # --- steps

    def _repeat_answer(self, session: Session, ticket: Ticket, number: int, now: float) -> Action:
        answer = self._answers.find(session.life, number)
        if answer is None:
            raise session_errors.make_answer_not_stored_error(session, number)
        self.repeats += 1
        self._lifecycle.mark_idle(session, now)
        return DeliverOutcome(ticket, answer.outcome, answer.position, is_repeat=True)

    def _join_step(self, session: Session, ticket: Ticket, number: int) -> list[Action]:
        step = session.find(number)
        is_next = step is None and session.running is None and (number == session.next or not session.is_numbered)
        if step is None:
            step = self._add_step(session, ticket, number, is_next)
        elif step.abandoned_bytes:
            self._abandoned_bytes -= step.abandoned_bytes
            step.abandoned_bytes = 0
        step.tickets[ticket] = None
        ticket.step = step
        if is_next:
            return [self._start_step(session, step)]
        self._count_waiting(session, ticket)
        if not step.is_running or ticket.deadline < step.deadline:
            self._deadlines.add(ticket.deadline, ticket)
        return []

    def _check_room(self, session: Session | None, size_bytes: int) -> None:
        if session is not None and not session.waiting_limit.has_room(size_bytes):
            raise session_errors.make_waiting_limit_error(session)
        if not self._room.has_room(size_bytes):
            raise session_errors.make_gateway_full_error(self._room.requests)

    def _count_waiting(self, session: Session, ticket: Ticket) -> None:
        rooms = (session.waiting_limit, self._room)

        def leave() -> None:
            ticket.stop_waiting = _do_nothing
            for room in rooms:
                room.add(-1, -ticket.size_bytes)

        ticket.stop_waiting = leave
        for room in rooms:
            room.add(1, ticket.size_bytes)

    def _add_step(self, session: Session, ticket: Ticket, number: int, is_next: bool) -> Step:
        window = session.settings.window
        if session.is_numbered and number > session.next + window:
            raise session_errors.make_seq_no_too_far_ahead_error(str(session), number, session.next, window)
        if not session.is_numbered and len(session.waiting) >= window:
            raise session_errors.make_window_full_error(session, window)
        session.arrived = number
        session.block.mark_busy(session)
        step = Step(session, session.life, number, ticket.parameters)
        if not is_next:
            session.enqueue(step)
        return step

    def _start_step(self, session: Session, step: Step) -> StartStep:
        ticket = next(iter(step.tickets))
        ticket.stop_waiting()
        step.is_running = True
        step.parameters = ticket.parameters
        step.parameters.is_start = not session.has_state  # the worker's model has no state of the session yet
        step.parameters.home = session.home
        step.parameters.life = session.life
        step.position = session.position + 1
        step.deadline = max([each.deadline for each in step.tickets])
        step.size_bytes = ticket.size_bytes
        session.running = step
        session.next = step.number
        session.has_first = True
        step.parameters.is_again = step.number == session.unconfirmed
        session.unconfirmed = 0  # only the first run is in doubt; the caller requests any later run
        return StartStep(step, ticket)

    def _conclude_step(self, session: Session, step: Step, outcome: Outcome) -> list[Action]:
        has_failed = isinstance(outcome, PenstockError)
        if not is_conclusive(outcome):
            if isinstance(outcome, WorkerLost) and session.settings.is_stateful and session.has_state:
                return self._end_session(session, LOST)
            return []
        session.position = step.position
        session.next = step.number + 1
        if not has_failed or isinstance(outcome, EngineFailed):
            session.has_state, session.home = True, step.parameters.home
        if session.is_numbered:
            self._answers.remember(session.life, step.number, outcome, step.position, session.settings.answers)
        return self._end_session(session, ENDED) if step.parameters.is_end else []

    def _end_session(self, session: Session, reason: str) -> list[Action]:
        session.over = reason
        return [*session.fail_waiting(session.waiting, SessionError(f"{session} {reason}"))]

    def _advance_session(self, session: Session, now: float) -> list[Action]:
        actions: list[Action] = []
        if session.waiting:
            if not session.is_numbered:
                while session.next not in session.waiting:  # the callers of the steps in between have left
                    session.next += 1
            step = session.dequeue(session.next)
            if step is not None:
                return [self._start_step(session, step)]
            if self._is_draining:
                actions += session.fail_waiting(session.waiting, session_errors.make_draining_error())
        self._lifecycle.mark_idle(session, now)
        return actions

    def _remove_ticket(self, ticket: Ticket, step: Step, now: float) -> list[Action]:
        ticket.step = None
        ticket.stop_waiting()
        del step.tickets[ticket]
        if step.tickets:
            return []
        if step.is_running:
            step.abandoned_bytes = step.size_bytes
            self._abandoned_bytes += step.size_bytes
            return [StopStep(step)] if self._abandoned_bytes > self._max_abandoned_bytes else []
        step.session.dequeue(step.number)
        self._lifecycle.mark_idle(step.session, now)
        return []

    def _fail_waiting_steps(self, sessions: Iterable[Session]) -> list[Action]:
        return [
            given
            for session in sessions
            for given in session.fail_waiting(session.waiting, session_errors.make_draining_error())
        ]

    def _iterate_sessions(self) -> Iterator[Session]:
        for block in self._blocks.values():
            yield from block.sessions.values()


def is_conclusive(outcome: Outcome) -> bool:
    """Return whether a repeat would give the same outcome, so that the session advances."""
    return not isinstance(outcome, PenstockError) or isinstance(outcome, CONCLUSIVE_ERRORS)


def _may_outlive_caller(ticket: Ticket, when: float) -> bool:
    """Return whether the step may outlive the caller's deadline: it waits, or has a later deadline."""
    step = ticket.step
    return step is not None and (not step.is_running or ticket.deadline < step.deadline)


def _would_wait(session: Session | None, parameters: SessionStep) -> bool:
    """Return whether a request with these parameters would have to wait before it runs."""
    if session is None:
        return not parameters.is_start and parameters.seq_no not in (None, 1)
    if session.running is None:
        return not parameters.is_start and parameters.seq_no is not None and parameters.seq_no > session.next
    return parameters.is_start or parameters.seq_no is None or parameters.seq_no >= session.next


def _do_nothing() -> None:
    """Do nothing, because the ticket is not counted in a limit."""
