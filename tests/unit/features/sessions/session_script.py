"""A session table under test, with its decisions so far."""

from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse, SessionStep, Timing
from penstock.core.settings import Sessions
from penstock.core.tensors import Tensor
from penstock.features.sessions.session import Action, DeliverOutcome, StartStep, Step, Ticket
from penstock.features.sessions.session_table import SessionTable

CONSTANTS = ("window", "answers", "max_sessions")  # of Sessions


def response(text: str = "", size: int = 0) -> InferResponse:
    return InferResponse("m", "1", text, [Tensor("y", "UINT8", (size,), bytes(size))], Timing())


class Sent:
    """A table, with its decisions so far."""

    def __init__(self, table: SessionTable | None = None, **settings: object) -> None:
        self.table = table or SessionTable()
        constants = {name: given for name, given in settings.items() if name in CONSTANTS}
        others = {name: given for name, given in settings.items() if name not in CONSTANTS}
        self.settings: Sessions = type("Few", (Sessions,), {"__module__": __name__} | constants)(**others)
        self.now = 0.0
        self.running: list[Step] = []
        self.given: dict[Ticket, DeliverOutcome] = {}
        self.stopped: list[Step] = []

    def send(
        self,
        seq_no: int | None = None,
        session: str = "s",
        start: bool = False,
        end: bool = False,
        deadline: float = 100.0,
        digest: bytes = b"",
        block: str = "blk",
        size: int = 0,
    ) -> Ticket:
        step = SessionStep(session, seq_no, start, end)
        ticket = Ticket(block, self.settings, step, deadline, size, digest)
        self.perform(self.table.add_request(ticket, self.now))
        return ticket

    def finish(
        self, outcome: InferResponse | PenstockError | None = None, session: str = "s", home: bytes = b"worker"
    ) -> None:
        """End the running step of a session, which ran on worker `home`."""
        (step,) = [step for step in self.running if step.session.session_id == session]
        self.running.remove(step)
        step.parameters.home = home
        self.perform(self.table.finish_step(step, outcome or response(str(step.number)), self.now))

    def leave(self, ticket: Ticket) -> None:
        self.perform(self.table.caller_left(ticket, self.now))

    def tick(self, now: float) -> None:
        self.now = now
        self.perform(self.table.tick(now))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartStep):
                assert action.ticket in action.step.tickets
                self.running.append(action.step)
            elif isinstance(action, DeliverOutcome):
                assert action.ticket not in self.given, "a ticket gets one outcome"
                self.given[action.ticket] = action
            else:
                self.stopped.append(action.step)

    def numbers(self) -> list[int]:
        return [step.number for step in self.running]

    def text(self, ticket: Ticket) -> str:
        outcome = self.given[ticket].outcome
        assert isinstance(outcome, InferResponse), outcome
        return outcome.request_id

    def error(self, ticket: Ticket, kind: type[PenstockError]) -> str:
        outcome = self.given[ticket].outcome
        assert type(outcome) is kind
        return outcome.message
