"""How sessions begin, begin anew, rest and are forgotten. Decides only."""

from penstock.core.errors import Overloaded, SessionError
from penstock.serving.sessions import faults
from penstock.serving.sessions.answers import KeptAnswers
from penstock.serving.sessions.faults import LOST
from penstock.serving.sessions.parts import Action, BlockSessions, Session, SessionRecord, Ticket, WaitingRoom, carried

SENT_AGAIN = 64  # requests of a session that may wait beside the window, as repeats of those in it


class SessionLives:
    def __init__(self, answers: KeptAnswers, max_waiting_bytes: float, lives: int) -> None:
        """So many bytes may wait in one session. `lives` have been before: no other gateway counts from there."""
        self._answers = answers
        self._max_waiting_bytes = max_waiting_bytes
        self._number = lives

    def open(self, block: BlockSessions, ticket: Ticket) -> Session:
        """Raises SessionError or Overloaded, and then nothing has changed."""
        asked, window = ticket.asked, ticket.settings.window
        if asked.seq_no is not None and not asked.is_start and asked.seq_no > 1 + window:
            raise faults.too_far(f"session '{asked.session_id}'", asked.seq_no, 1, window)
        self.make_room(block)
        return self._new(block, ticket)

    def make_room(self, block: BlockSessions) -> None:
        if len(block.sessions) >= block.settings.max_sessions:
            oldest = block.oldest_idle()
            if oldest is None:
                raise Overloaded(
                    f"{len(block.sessions)} sessions of this model are busy at this gateway already "
                    "(sessions.max_sessions); try again later"
                )
            self.forget(oldest)

    def begin(self, session: Session, ticket: Ticket) -> list[Action]:
        """Takes a start for a session that is there: its first step at last, the same start again, or a new life.

        Afterwards the block names the session that stands under this id.
        """
        seq_no = ticket.asked.seq_no
        if seq_no is not None and session.is_numbered:
            if not session.has_first:
                return self._set_first(session, ticket, seq_no)
            if self._is_same_start(session, ticket, seq_no):
                return []
        actions: list[Action] = [*session.refuse(session.waiting, SessionError(f"{session} was started anew"))]
        self.forget_answers(session)
        new = self._new(session.block, ticket)
        new.running = session.running  # still one at a time: the new life waits for it
        if new.running is not None:
            new.running.session = new
        return actions

    def rest(self, session: Session, now: float) -> None:
        """Keeps a session of which nothing runs or waits for a while, unless nothing ever came of it."""
        if session.running is not None or session.waiting or not session.is_known:
            return
        if not session.position and session.first == 1 and not session.epoch:
            self.forget(session)
        else:
            session.block.rest(session, now)

    def forget(self, session: Session) -> None:
        session.block.forget(session)
        session.is_known = False
        self.forget_answers(session)

    def record(self, session: Session) -> SessionRecord:
        oldest = max(session.first, session.next - session.settings.answers)
        return SessionRecord(**carried(session), answers=self._answers.of(session.life, oldest, session.next))

    def adopt(self, block: BlockSessions, session_id: str, record: SessionRecord, epoch: int) -> Session:
        settings = block.settings
        session = Session(session_id, block, settings, record.life, record.is_numbered, self._room(settings.window))
        for name, value in carried(record).items():
            setattr(session, name, value)
        session.epoch, session.doubtful = epoch, record.begun
        for seq_no, kept in record.answers.items():
            self._answers.keep(record.life, seq_no, kept.outcome, kept.position, settings.answers)
        block.sessions[session_id] = session
        return session

    def forget_answers(self, session: Session) -> None:
        oldest = max(session.first, session.next - session.settings.answers)
        self._answers.forget(session.life, oldest, session.next)

    def _new(self, block: BlockSessions, ticket: Ticket) -> Session:
        asked = ticket.asked
        self._number += 1
        room = self._room(ticket.settings.window)
        session = Session(asked.session_id, block, ticket.settings, self._number, asked.seq_no is not None, room)
        session.epoch = ticket.epoch
        if asked.is_start:
            session.first = session.next = asked.seq_no or 1
            session.has_first, session.digest = True, ticket.digest
        block.sessions[asked.session_id] = session
        return session

    def _room(self, window: int) -> WaitingRoom:
        return WaitingRoom(window + SENT_AGAIN, self._max_waiting_bytes)

    def _set_first(self, session: Session, ticket: Ticket, seq_no: int) -> list[Action]:
        """Later steps came before the one that starts the session."""
        session.first = session.next = seq_no
        session.has_first, session.digest = True, ticket.digest
        outside = [n for n in session.waiting if not seq_no <= n <= seq_no + session.settings.window]
        return [*session.refuse(outside, SessionError(f"{session} was started with seq_no {seq_no}"))]

    def _is_same_start(self, session: Session, ticket: Ticket, seq_no: int) -> bool:
        """Whether running it anew would give the same: the inputs are those of before, and nothing ran after it."""
        if seq_no != session.first or session.over == LOST:
            return False
        if session.next == seq_no and session.find(seq_no) is None:
            session.digest = ticket.digest  # it never ran, or failed and is open
            return True
        is_last = session.next == seq_no or (
            session.next == seq_no + 1
            and session.running is None
            and self._answers.find(session.life, seq_no) is not None
        )
        return is_last and session.digest == ticket.digest
