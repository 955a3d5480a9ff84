"""The session table: which request of a session runs now, which wait, and which have their answer. Decides; never acts.

A session is a row of steps, of which one runs at a time. A step is one request, named by its seq_no or by when it came.
Each caller of a step has a ticket for its outcome; who sends the same step again gets another ticket for it.
"""

from collections.abc import Callable, Iterable, Iterator
from math import inf

from penstock.core.errors import CONCLUSIVE, EngineFailed, PenstockError, SessionError, WorkerLost
from penstock.core.requests import SessionStep
from penstock.core.settings import Sessions
from penstock.serving.sessions import faults
from penstock.serving.sessions.answers import KeptAnswers, Outcome
from penstock.serving.sessions.deadlines import TicketDeadlines
from penstock.serving.sessions.faults import ENDED, LOST, REPLACED
from penstock.serving.sessions.lives import SessionLives
from penstock.serving.sessions.parts import (
    Action,
    BlockSessions,
    GiveOutcome,
    Session,
    SessionRecord,
    StartStep,
    Step,
    StopStep,
    Ticket,
    WaitingRoom,
)

MAX_ANSWER_BYTES = 256 * 1024 * 1024  # kept of all sessions
MAX_ABANDONED_BYTES = 64 * 1024 * 1024  # of steps that run although all their callers left
SESSION_SHARE = 0.25  # of the bytes that may wait, which one session may have


class SessionTable:
    """Each event costs O(1) but for the deadlines' heap; what ends or begins anew costs what waits in that session."""

    def __init__(
        self,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        max_abandoned_bytes: int = MAX_ABANDONED_BYTES,
        max_waiting: float = inf,
        max_waiting_bytes: float = inf,
        lives: int = 0,
    ) -> None:
        self._blocks: dict[str, BlockSessions] = {}
        self._answers = KeptAnswers(max_answer_bytes)
        self._lives = SessionLives(self._answers, max_waiting_bytes * SESSION_SHARE, lives)
        self._room = WaitingRoom(max_waiting, max_waiting_bytes)
        self._deadlines = TicketDeadlines()
        self._abandoned_bytes = 0
        self._max_abandoned_bytes = max_abandoned_bytes
        self._is_draining = False
        self.repeats = 0

    def open_sessions(self) -> int:
        return sum(len(block.sessions) - len(block.over) for block in self._blocks.values())

    def waiting_steps(self) -> int:
        return sum(block.waiting for block in self._blocks.values())

    def due(self) -> float | None:
        """When `tick` has a deadline to look at, at the earliest."""
        return self._deadlines.next()

    # --- events

    def arrive(self, ticket: Ticket, now: float) -> list[Action]:
        """Raises SessionError, Overloaded or Draining, and then knows nothing of the ticket."""
        if self._is_draining:
            raise faults.draining()
        asked = ticket.asked
        assert asked.seq_no is None or asked.seq_no >= 1, f"seq_no {asked.seq_no}"
        block = self._blocks.get(ticket.block_id)
        if block is None:
            block = self._blocks[ticket.block_id] = BlockSessions(ticket.settings)
        block.settings = ticket.settings
        session = block.sessions.get(asked.session_id)
        if session is not None and session.is_leaving:
            raise faults.moved(session)
        if _would_wait(session, asked):
            self._check_room(session, ticket.size_bytes)
        actions: list[Action] = []
        if session is None:
            session = self._lives.open(block, ticket)
        elif asked.is_start:
            actions = self._lives.begin(session, ticket)
            session = block.sessions[asked.session_id]
        if session.is_numbered != (asked.seq_no is not None):
            raise faults.mixed(session)
        number = session.arrived + 1 if asked.seq_no is None else asked.seq_no
        if number < session.next:
            return [*actions, self._repeat(session, ticket, number, now)]
        if session.over:
            raise SessionError(f"{session} {session.over}")
        return [*actions, *self._join(session, ticket, number)]

    def done(self, step: Step, outcome: Outcome, now: float) -> list[Action]:
        """A step that was started has ended."""
        session = step.session
        assert session.running is step, f"{session} does not run step {step.number}"
        session.running = None
        self._abandoned_bytes -= step.abandoned_bytes
        actions: list[Action] = [*step.give(outcome)]
        if step.life == session.life:
            actions += self._conclude(session, step, outcome)
        return actions + self._advance(session, now)

    def find(self, block_id: str, session_id: str) -> Session | None:
        block = self._blocks.get(block_id)
        return None if block is None else block.sessions.get(session_id)

    def known(self) -> list[tuple[str, str]]:
        """The sessions here, by block and id."""
        return [(block_id, name) for block_id, block in self._blocks.items() for name in block.sessions]

    def disown(self, is_ours: Callable[[str], bool]) -> list[Action]:
        """The list of gateways has changed: who waits in a session of another is sent there; what runs is answered."""
        actions: list[Action] = []
        for session in self._sessions():
            session.is_leaving = not is_ours(session.session_id)
            if session.is_leaving:
                actions += session.refuse(session.waiting, faults.moved(session))
        return actions

    def give_up(self, session: Session) -> list[Action]:
        """Another gateway wants the session: `take` may follow when nothing of it runs."""
        session.is_leaving = True
        return [*session.refuse(session.waiting, faults.moved(session))]

    def take(self, session: Session) -> SessionRecord:
        """The session is here no more."""
        assert session.running is None, f"{session} runs"
        assert not session.waiting, f"somebody waits in {session}"
        record = self._lives.record(session)
        if session.is_known:
            self._lives.forget(session)
        return record

    def adopt(
        self, block_id: str, settings: Sessions, session_id: str, record: SessionRecord, epoch: int, now: float
    ) -> None:
        """A session that another gateway had. Raises Overloaded where there are too many here."""
        block = self._blocks.setdefault(block_id, BlockSessions(settings))
        assert session_id not in block.sessions, f"session '{session_id}' is here"
        block.settings = settings
        self._lives.make_room(block)
        self._lives.rest(self._lives.adopt(block, session_id, record, epoch), now)

    def left(self, ticket: Ticket, now: float) -> list[Action]:
        """The caller left, or has its outcome. What runs goes on, so that sending it again finds its answer."""
        return [] if ticket.step is None else self._remove(ticket, ticket.step, now)

    def lost(self, worker: bytes, block_ids: Iterable[str], now: float) -> list[Action]:
        """The worker holds these blocks no more: what their models kept of sessions there is gone."""
        actions: list[Action] = []
        for block in [self._blocks[block_id] for block_id in block_ids if block_id in self._blocks]:
            if not block.settings.is_stateful:
                continue
            for session in [*block.sessions.values()]:
                if session.keeper() == worker and not session.over:
                    block.wake(session)
                    actions += self._end(session, LOST)
                    self._lives.rest(session, now)
        return actions

    def retire(
        self, block_id: str, error: PenstockError, heir: tuple[str, Sessions] | None = None, now: float = 0.0
    ) -> list[Action]:
        """The block is gone. Its sessions go on with its heir, but for those of which a model had the state; without an
        heir what waits fails. What runs is answered, in either case."""
        block = self._blocks.pop(block_id, None)
        if block is None:
            return []
        to = None if heir is None else self._blocks.setdefault(heir[0], BlockSessions(heir[1]))
        actions: list[Action] = []
        for session in list(block.sessions.values()):
            if to is None or session.session_id in to.sessions:
                actions += session.refuse(session.waiting, error)
                self._lives.forget_answers(session)
                session.life, session.is_known = 0, False
                continue
            to.sessions[session.session_id] = session
            session.block = to
            to.waiting += len(session.waiting)
            if not session.over and (block.settings.is_stateful or to.settings.is_stateful):
                actions += self._end(session, REPLACED)
            self._lives.rest(session, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fails what is past its deadline, and forgets sessions that idled too long."""
        actions: list[Action] = []
        for ticket in self._deadlines.passed(now):
            assert ticket.step is not None
            late = GiveOutcome(ticket, faults.late(ticket.step))
            actions += [*self._remove(ticket, ticket.step, now), late]
        for block in self._blocks.values():
            for session in block.idle_since(now - block.settings.idle_s):
                self._lives.forget(session)
        return actions

    def drain(self) -> list[Action]:
        """Nothing comes any more: who waits for a step that is not there waits in vain."""
        self._is_draining = True
        return self._refuse_all(session for session in self._sessions() if session.running is None)

    def close(self) -> list[Action]:
        """Nothing more is started."""
        self._is_draining = True
        return self._refuse_all(self._sessions())

    # --- steps

    def _repeat(self, session: Session, ticket: Ticket, number: int, now: float) -> Action:
        answer = self._answers.find(session.life, number)
        if answer is None:
            raise faults.not_kept(session, number)
        self.repeats += 1
        self._lives.rest(session, now)
        return GiveOutcome(ticket, answer.outcome, answer.position, is_repeat=True)

    def _join(self, session: Session, ticket: Ticket, number: int) -> list[Action]:
        step = session.find(number)
        is_next = step is None and session.running is None and (number == session.next or not session.is_numbered)
        if step is None:
            step = self._add(session, ticket, number, is_next)
        elif step.abandoned_bytes:
            self._abandoned_bytes -= step.abandoned_bytes
            step.abandoned_bytes = 0
        step.tickets[ticket] = None
        ticket.step = step
        if is_next:
            return [self._start(session, step)]
        self._enter(session, ticket)
        if not step.is_running or ticket.deadline < step.deadline:
            self._deadlines.watch(ticket)
        return []

    def _check_room(self, session: Session | None, size_bytes: int) -> None:
        if session is not None and not session.room.has_room(size_bytes):
            raise faults.no_room(session)
        if not self._room.has_room(size_bytes):
            raise faults.full(self._room.requests)

    def _enter(self, session: Session, ticket: Ticket) -> None:
        rooms = (session.room, self._room)

        def leave() -> None:
            ticket.leave_room = _no_room
            for room in rooms:
                room.add(-1, -ticket.size_bytes)

        ticket.leave_room = leave
        for room in rooms:
            room.add(1, ticket.size_bytes)

    def _add(self, session: Session, ticket: Ticket, number: int, is_next: bool) -> Step:
        window = session.settings.window
        if session.is_numbered and number > session.next + window:
            raise faults.too_far(str(session), number, session.next, window)
        if not session.is_numbered and len(session.waiting) >= window:
            raise faults.too_many(session, window)
        session.arrived = number
        session.block.wake(session)
        step = Step(session, session.life, number, ticket.asked)
        if not is_next:
            session.wait(step)
        return step

    def _start(self, session: Session, step: Step) -> StartStep:
        ticket = next(iter(step.tickets))
        ticket.leave_room()
        step.is_running = True
        step.asked = ticket.asked
        step.asked.is_start = not session.has_state  # as the worker is told
        step.asked.home = session.home
        step.asked.life = session.life
        step.position = session.position + 1
        step.deadline = max([each.deadline for each in step.tickets])
        step.size_bytes = ticket.size_bytes
        session.running = step
        session.next = step.number
        session.has_first = True
        step.asked.is_again = step.number == session.doubtful
        session.doubtful = 0  # who sends it again after that means it
        return StartStep(step, ticket)

    def _conclude(self, session: Session, step: Step, outcome: Outcome) -> list[Action]:
        has_failed = isinstance(outcome, PenstockError)
        if not is_conclusive(outcome):
            if isinstance(outcome, WorkerLost) and session.settings.is_stateful and session.has_state:
                return self._end(session, LOST)
            return []
        session.position = step.position
        session.next = step.number + 1
        if not has_failed or isinstance(outcome, EngineFailed):
            session.has_state, session.home = True, step.asked.home
        if session.is_numbered:
            self._answers.keep(session.life, step.number, outcome, step.position, session.settings.answers)
        return self._end(session, ENDED) if step.asked.is_end else []

    def _end(self, session: Session, reason: str) -> list[Action]:
        session.over = reason
        return [*session.refuse(session.waiting, SessionError(f"{session} {reason}"))]

    def _advance(self, session: Session, now: float) -> list[Action]:
        actions: list[Action] = []
        if session.waiting:
            if not session.is_numbered:
                while session.next not in session.waiting:  # those between have left
                    session.next += 1
            step = session.unwait(session.next)
            if step is not None:
                return [self._start(session, step)]
            if self._is_draining:
                actions += session.refuse(session.waiting, faults.draining())
        self._lives.rest(session, now)
        return actions

    def _remove(self, ticket: Ticket, step: Step, now: float) -> list[Action]:
        ticket.step = None
        ticket.leave_room()
        del step.tickets[ticket]
        if step.tickets:
            return []
        if step.is_running:
            step.abandoned_bytes = step.size_bytes
            self._abandoned_bytes += step.size_bytes
            return [StopStep(step)] if self._abandoned_bytes > self._max_abandoned_bytes else []
        step.session.unwait(step.number)
        self._lives.rest(step.session, now)
        return []

    def _refuse_all(self, sessions: Iterable[Session]) -> list[Action]:
        return [given for session in sessions for given in session.refuse(session.waiting, faults.draining())]

    def _sessions(self) -> Iterator[Session]:
        for block in self._blocks.values():
            yield from block.sessions.values()


def is_conclusive(outcome: Outcome) -> bool:
    return not isinstance(outcome, PenstockError) or isinstance(outcome, CONCLUSIVE)


def _would_wait(session: Session | None, asked: SessionStep) -> bool:
    """Whether such a request would neither run at once nor have its answer already."""
    if session is None:
        return not asked.is_start and asked.seq_no not in (None, 1)
    if session.running is None:
        return not asked.is_start and asked.seq_no is not None and asked.seq_no > session.next
    return asked.is_start or asked.seq_no is None or asked.seq_no >= session.next


def _no_room() -> None:
    """It waits nowhere."""
