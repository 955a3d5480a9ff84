"""Creation, restart, idling and removal of sessions in the session table. Pure: no I/O."""

from penstock.core.errors import Overloaded, SessionError
from penstock.features.sessions import session_errors
from penstock.features.sessions.session import (
    Action,
    BlockSessions,
    Session,
    SessionRecord,
    Ticket,
    WaitingLimit,
    get_record_fields,
)
from penstock.features.sessions.session_answers import RememberedAnswers
from penstock.features.sessions.session_errors import LOST

MAX_WAITING_REPEATS = 64  # repeated requests of a session that may wait in addition to its window


class SessionLifecycle:
    """Creates, restarts, idles and removes sessions."""

    def __init__(self, answers: RememberedAnswers, max_waiting_bytes: float, life: int) -> None:
        """Create a lifecycle.

        `max_waiting_bytes` limits the waiting requests of one session. Starts of sessions are numbered: the first gets
        the number `life`, and later ones count up. Gateways must begin at different numbers.
        """
        self._answers = answers
        self._max_waiting_bytes = max_waiting_bytes
        self._last_life = life

    def open(self, block: BlockSessions, ticket: Ticket) -> Session:
        """Create the ticket's session, or raise SessionError or Overloaded without a change."""
        asked, window = ticket.parameters, ticket.settings.window
        if asked.seq_no is not None and not asked.is_start and asked.seq_no > 1 + window:
            raise session_errors.make_seq_no_too_far_ahead_error(
                f"session '{asked.session_id}'", asked.seq_no, 1, window
            )
        self.make_room(block)
        return self._create_session(block, ticket)

    def make_room(self, block: BlockSessions) -> None:
        """Remove the longest-idle session if the block has max_sessions; raise Overloaded if none is idle."""
        if len(block.sessions) >= block.settings.max_sessions:
            oldest = block.find_oldest_idle()
            if oldest is None:
                raise Overloaded(
                    f"{len(block.sessions)} sessions of this model are already busy at this gateway, the limit "
                    "(sessions.max_sessions); try again later"
                )
            self.remove(oldest)

    def restart_or_repeat(self, session: Session, ticket: Ticket) -> list[Action]:
        """Handle a request to start an existing session: a start that came after later steps, a repeat, or a restart.

        A restart replaces the session in `block.sessions` with a new session, which has a new life.
        """
        seq_no = ticket.parameters.seq_no
        if seq_no is not None and session.is_numbered:
            if not session.has_first:
                return self._set_first(session, ticket, seq_no)
            if self._is_same_start(session, ticket, seq_no):
                return []
        actions: list[Action] = [*session.fail_waiting(session.waiting, SessionError(f"{session} was restarted"))]
        self.forget_answers(session)
        new = self._create_session(session.block, ticket)
        new.running = session.running  # the new life waits for the running step of the old life
        if new.running is not None:
            new.running.session = new
        return actions

    def mark_idle(self, session: Session, now: float) -> None:
        """Mark a session as idle, unless the session is busy. Remove a session of which no step ever finished."""
        if session.running is not None or session.waiting or not session.is_in_table:
            return
        if not session.position and session.first == 1 and not session.epoch:
            self.remove(session)
        else:
            session.block.mark_idle(session, now)

    def remove(self, session: Session) -> None:
        session.block.remove(session)
        session.is_in_table = False
        self.forget_answers(session)

    def make_record(self, session: Session) -> SessionRecord:
        oldest = max(session.first, session.next - session.settings.answers)
        return SessionRecord(
            **get_record_fields(session), answers=self._answers.list_answers(session.life, oldest, session.next)
        )

    def insert(self, block: BlockSessions, session_id: str, record: SessionRecord, epoch: int) -> Session:
        settings = block.settings
        session = Session(
            session_id, block, settings, record.life, record.is_numbered, self._make_waiting_limit(settings.window)
        )
        for name, value in get_record_fields(record).items():
            setattr(session, name, value)
        session.epoch, session.unconfirmed = epoch, record.unconfirmed
        for seq_no, kept in record.answers.items():
            self._answers.remember(record.life, seq_no, kept.outcome, kept.position, settings.answers)
        block.sessions[session_id] = session
        return session

    def forget_answers(self, session: Session) -> None:
        oldest = max(session.first, session.next - session.settings.answers)
        self._answers.forget(session.life, oldest, session.next)

    def _create_session(self, block: BlockSessions, ticket: Ticket) -> Session:
        asked = ticket.parameters
        self._last_life += 1
        room = self._make_waiting_limit(ticket.settings.window)
        session = Session(asked.session_id, block, ticket.settings, self._last_life, asked.seq_no is not None, room)
        session.epoch = ticket.epoch
        if asked.is_start:
            session.first = session.next = asked.seq_no or 1
            session.has_first, session.digest = True, ticket.digest
        block.sessions[asked.session_id] = session
        return session

    def _make_waiting_limit(self, window: int) -> WaitingLimit:
        return WaitingLimit(window + MAX_WAITING_REPEATS, self._max_waiting_bytes)

    def _set_first(self, session: Session, ticket: Ticket, seq_no: int) -> list[Action]:
        """Set the first step's number if the start arrives after later steps; fail steps outside the window."""
        session.first = session.next = seq_no
        session.has_first, session.digest = True, ticket.digest
        outside = [n for n in session.waiting if not seq_no <= n <= seq_no + session.settings.window]
        return [*session.fail_waiting(outside, SessionError(f"{session} was started with seq_no {seq_no}"))]

    def _is_same_start(self, session: Session, ticket: Ticket, seq_no: int) -> bool:
        """Return whether the ticket repeats the session's start: it has the same inputs, and no later step has run."""
        if seq_no != session.first or session.over == LOST:
            return False
        if session.next == seq_no and session.find(seq_no) is None:
            session.digest = ticket.digest  # the start never ran, or failed and may run again
            return True
        is_last = session.next == seq_no or (
            session.next == seq_no + 1
            and session.running is None
            and self._answers.find(session.life, seq_no) is not None
        )
        return is_last and session.digest == ticket.digest
