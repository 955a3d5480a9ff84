"""What the session table is made of: blocks, sessions, their steps and callers, and what it decides."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.requests import SessionStep
from penstock.core.settings import Sessions
from penstock.serving.sessions.answers import KeptAnswer, Outcome


@dataclass(slots=True, eq=False)
class Ticket:
    """One caller of a step."""

    block_id: str
    settings: Sessions
    asked: SessionStep
    deadline: float
    size_bytes: int = 0
    digest: bytes = b""  # of a numbered start's inputs: whether it is the same one again
    epoch: int = 0  # by which this gateway owns the session in the store; 0: there is none
    step: "Step | None" = None  # whose outcome it waits for
    leave_room: Callable[[], None] = lambda: None  # where it waits: its step does not run, or with another's request


@dataclass(slots=True)
class WaitingRoom:
    """What may wait, of one session or of all."""

    max_requests: float
    max_bytes: float
    requests: int = 0
    size_bytes: int = 0

    def has_room(self, size_bytes: int) -> bool:
        """One alone may always wait: admission has taken it."""
        return not self.requests or (
            self.requests < self.max_requests and self.size_bytes + size_bytes <= self.max_bytes
        )

    def add(self, requests: int, size_bytes: int) -> None:
        self.requests += requests
        self.size_bytes += size_bytes


@dataclass(slots=True, eq=False)
class Step:
    """One request of a session."""

    session: "Session"
    life: int  # of the session in which it came
    number: int  # its seq_no, or by arrival
    asked: SessionStep  # of the caller whose request it is
    tickets: dict[Ticket, None] = field(default_factory=dict)
    is_running: bool = False
    position: int = 0  # in the order in which steps ran, from 1
    deadline: float = 0.0  # of the run
    size_bytes: int = 0
    abandoned_bytes: int = 0  # its size, while it runs and nobody waits for it

    def give(self, outcome: Outcome) -> "list[GiveOutcome]":
        given = [GiveOutcome(ticket, outcome, self.position) for ticket in self.tickets]
        for ticket in self.tickets:
            ticket.step = None
            ticket.leave_room()
        self.tickets.clear()
        return given


@dataclass(slots=True, eq=False)
class Session:
    session_id: str
    block: "BlockSessions"
    settings: Sessions
    life: int
    is_numbered: bool
    room: WaitingRoom
    first: int = 1
    next: int = 1  # the step that runs or is awaited
    arrived: int = 0  # without seq_no: the last number given
    position: int = 0  # of the last step that is done
    has_first: bool = False  # `first` is certain: a start came, or a step was started
    has_state: bool = False  # a worker's model has seen it
    home: bytes = b""  # that worker, as the router says
    digest: bytes = b""
    over: str = ""  # why it takes no more: ENDED, LOST or REPLACED
    running: Step | None = None  # perhaps still one of an earlier life
    waiting: dict[int, Step] = field(default_factory=dict)
    rested: float = 0.0  # when it was last heard of
    is_known: bool = True  # False: the table has let go of it
    is_leaving: bool = False  # another gateway owns it: it takes no more here
    epoch: int = 0  # as a ticket's
    doubtful: int = 0  # the step that an earlier owner began, and of whose end nobody knows

    def find(self, number: int) -> Step | None:
        running = self.running
        if running is not None and running.number == number and running.life == self.life:
            return running
        return self.waiting.get(number)

    def keeper(self) -> bytes:
        """The worker that has its state, also where a step has run there of which the table does not know yet."""
        running = self.running
        return running.asked.home if running is not None and running.life == self.life else self.home

    def wait(self, step: Step) -> None:
        self.waiting[step.number] = step
        self.block.waiting += 1

    def unwait(self, number: int) -> Step | None:
        step = self.waiting.pop(number, None)
        if step is not None:
            self.block.waiting -= 1
        return step

    def refuse(self, numbers: Iterable[int], error: PenstockError) -> "list[GiveOutcome]":
        """Fails the waiting steps with these numbers."""
        steps = [self.unwait(number) for number in list(numbers)]
        return [given for step in steps if step is not None for given in step.give(error)]

    def __str__(self) -> str:
        return f"session '{self.session_id}'"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What goes from one owner of a session to the next; nothing of it runs or waits."""

    life: int
    is_numbered: bool
    first: int
    next: int
    arrived: int
    position: int
    has_first: bool
    has_state: bool
    home: bytes
    digest: bytes
    over: str
    answers: dict[int, KeptAnswer] = field(default_factory=dict)
    begun: int = 0  # the step that was begun and of which no end is known; 0: none


CARRIED = tuple(each.name for each in fields(SessionRecord) if each.name not in ("answers", "begun"))


def carried(of: object) -> dict[str, Any]:
    """What a session, its record and the record's message have alike."""
    return {name: getattr(of, name) for name in CARRIED}


@dataclass(slots=True, eq=False)
class BlockSessions:
    """A block's sessions; idle ones are also kept in the order in which they were last heard of."""

    settings: Sessions
    sessions: dict[str, Session] = field(default_factory=dict)
    idle: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    over: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    waiting: int = 0  # steps

    def rest(self, session: Session, now: float) -> None:
        session.rested = now
        shelf = self.over if session.over else self.idle
        shelf[session.session_id] = session
        shelf.move_to_end(session.session_id)

    def wake(self, session: Session) -> None:
        self.idle.pop(session.session_id, None)
        self.over.pop(session.session_id, None)

    def forget(self, session: Session) -> None:
        self.wake(session)
        del self.sessions[session.session_id]

    def oldest_idle(self) -> Session | None:
        """Sessions that are over come before those that may still go on."""
        return next(chain(self.over.values(), self.idle.values()), None)

    def idle_since(self, then: float) -> Iterator[Session]:
        """Sessions last heard of by then; the caller forgets each before it takes the next."""
        for shelf in (self.over, self.idle):
            while shelf and (oldest := next(iter(shelf.values()))).rested <= then:
                yield oldest


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run the step, with the request of this ticket's caller."""

    step: Step
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class GiveOutcome:
    ticket: Ticket
    outcome: Outcome
    position: int = 0
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class StopStep:
    """Too much runs for which nobody waits: give the step up."""

    step: Step


Action = StartStep | GiveOutcome | StopStep
