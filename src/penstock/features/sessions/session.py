"""The parts of the session table: sessions, their steps, the callers of steps, and the actions that the table returns.

A session is *busy* if one of its steps runs or waits, and *idle* otherwise. It is *over* if it accepts no more steps
(it ended, or its model's state was lost), and *moving* while another gateway takes it. Each restart
of a session begins a new *life*, a numbered period of the session, in which earlier answers no longer count.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.requests import SessionStep
from penstock.core.settings import Sessions
from penstock.features.sessions.session_answers import Outcome, RememberedAnswer


@dataclass(slots=True, eq=False)
class Ticket:
    """One caller of a step, who waits for the step's outcome."""

    block_id: str
    settings: Sessions
    parameters: SessionStep  # the session parameters of the caller's request
    deadline: float
    size_bytes: int = 0
    digest: bytes = b""  # of a numbered start's inputs; it distinguishes a repeated start from a new one
    epoch: int = 0  # the epoch under which this gateway owns the session in the store; 0: no store
    step: "Step | None" = None  # the step whose outcome the caller waits for
    stop_waiting: Callable[[], None] = lambda: None  # stops counting the caller in the waiting limits


@dataclass(slots=True)
class WaitingLimit:
    """The limit on waiting requests and bytes, of one session or of all sessions."""

    max_requests: float
    max_bytes: float
    requests: int = 0
    size_bytes: int = 0

    def has_room(self, size_bytes: int) -> bool:
        """Return whether one more request may wait. The first request always may: admission checked its size."""
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
    life: int  # the session's life when the step was added
    number: int  # its seq_no, or a number by order of arrival
    parameters: SessionStep  # the parameters of the caller whose request is run
    tickets: dict[Ticket, None] = field(default_factory=dict)
    is_running: bool = False
    position: int = 0  # in the order in which steps ran, from 1
    deadline: float = 0.0  # of the run
    size_bytes: int = 0
    abandoned_bytes: int = 0  # the step's size if it runs although all of its callers left

    def deliver(self, outcome: Outcome) -> "list[DeliverOutcome]":
        given = [DeliverOutcome(ticket, outcome, self.position) for ticket in self.tickets]
        for ticket in self.tickets:
            ticket.step = None
            ticket.stop_waiting()
        self.tickets.clear()
        return given


@dataclass(slots=True, eq=False)
class Session:
    """An ordered session: one step runs at a time, in the order of numbers or of arrival."""

    session_id: str
    block: "BlockSessions"
    settings: Sessions
    life: int
    is_numbered: bool
    waiting_limit: WaitingLimit
    first: int = 1  # number of its first step
    next: int = 1  # number of the step that runs or is awaited
    arrived: int = 0  # without seq_no: the last number assigned
    position: int = 0  # of the last step that is done
    has_first: bool = False  # `first` is certain: a start came, or a step was started
    has_state: bool = False  # a worker's model holds state of it
    home: bytes = b""  # the worker with the state, by the router's key
    digest: bytes = b""  # of its numbered start's inputs
    over: str = ""  # why the session accepts no more steps (ENDED, LOST or REPLACED); empty: it accepts steps
    running: Step | None = None  # may be a step of an earlier life
    waiting: dict[int, Step] = field(default_factory=dict)
    last_used: float = 0.0  # when it became idle
    is_in_table: bool = True  # False once the table has removed it
    is_moving: bool = False  # another gateway owns it: it accepts no more steps here
    epoch: int = 0  # the ownership epoch, as in Ticket
    unconfirmed: int = 0  # number of a step that an earlier owner started and may not have finished; 0: none

    def find(self, number: int) -> Step | None:
        running = self.running
        if running is not None and running.number == number and running.life == self.life:
            return running
        return self.waiting.get(number)

    def find_state_worker(self) -> bytes:
        """Return the worker that has the state of the session: the worker of the running step, or otherwise `home`."""
        running = self.running
        return running.parameters.home if running is not None and running.life == self.life else self.home

    def enqueue(self, step: Step) -> None:
        self.waiting[step.number] = step
        self.block.waiting += 1

    def dequeue(self, number: int) -> Step | None:
        step = self.waiting.pop(number, None)
        if step is not None:
            self.block.waiting -= 1
        return step

    def fail_waiting(self, numbers: Iterable[int], error: PenstockError) -> "list[DeliverOutcome]":
        steps = [self.dequeue(number) for number in list(numbers)]
        return [given for step in steps if step is not None for given in step.deliver(error)]

    def __str__(self) -> str:
        return f"session '{self.session_id}'"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The part of a session that moves from one owner to the next, while none of its steps runs or waits."""

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
    answers: dict[int, RememberedAnswer] = field(default_factory=dict)
    unconfirmed: int = 0  # number of a step that was started and may not have finished; 0: none


RECORD_FIELDS = tuple(each.name for each in fields(SessionRecord) if each.name not in ("answers", "unconfirmed"))


def get_record_fields(source: object) -> dict[str, Any]:
    """Return the fields that a Session, a SessionRecord and a SessionState message have in common."""
    return {name: getattr(source, name) for name in RECORD_FIELDS}


@dataclass(slots=True, eq=False)
class BlockSessions:
    """A block's sessions, with its idle sessions in the order in which they were last used."""

    settings: Sessions
    sessions: dict[str, Session] = field(default_factory=dict)  # all, by id
    idle: OrderedDict[str, Session] = field(default_factory=OrderedDict)  # idle, but not over
    over: OrderedDict[str, Session] = field(default_factory=OrderedDict)  # idle and over
    waiting: int = 0  # waiting steps of all sessions

    def mark_idle(self, session: Session, now: float) -> None:
        session.last_used = now
        order = self.over if session.over else self.idle
        order[session.session_id] = session
        order.move_to_end(session.session_id)

    def mark_busy(self, session: Session) -> None:
        self.idle.pop(session.session_id, None)
        self.over.pop(session.session_id, None)

    def remove(self, session: Session) -> None:
        self.mark_busy(session)
        del self.sessions[session.session_id]

    def find_oldest_idle(self) -> Session | None:
        """Return the longest-idle session, preferably one that is over; None if all are busy."""
        return next(chain(self.over.values(), self.idle.values()), None)

    def iterate_idle_since(self, time: float) -> Iterator[Session]:
        """Yield the sessions idle since `then` or longer. The caller must remove each before taking the next."""
        for order in (self.over, self.idle):
            while order and (oldest := next(iter(order.values()))).last_used <= time:
                yield oldest


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run the step with the request of the ticket's caller."""

    step: Step
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class DeliverOutcome:
    """Deliver a step's outcome to a caller."""

    ticket: Ticket
    outcome: Outcome
    position: int = 0
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class StopStep:
    """Cancel the step, because its callers left and steps without callers hold too many bytes."""

    step: Step


Action = StartStep | DeliverOutcome | StopStep
