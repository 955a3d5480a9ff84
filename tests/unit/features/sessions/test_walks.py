"""Random events on a session, compared with a slow and simple model."""

from random import Random

import pytest

from penstock.core.errors import EngineFailed, PenstockError, QueueFull, SessionError
from penstock.core.requests import InferResponse
from penstock.core.settings import Sessions
from penstock.features.sessions.session import Ticket
from tests.unit.features.sessions.session_script import Sent, response


class Plain:
    """One numbered session, implemented simply and slowly."""

    def __init__(self, settings: Sessions) -> None:
        self.settings = settings
        self.first = self.next = 1
        self.record: dict[int, str] = {}
        self.running: int | None = None
        self.is_stale = False  # the running step is from before the restart
        self.wanted: dict[int, list[Ticket]] = {}  # callers of a step that waits or runs
        self.stale: list[Ticket] = []

    def arrival(self, number: int) -> str:
        """Return the outcome of a request: its recorded answer, an error, or `open`."""
        if number < self.next:
            is_kept = number in self.record and number >= self.next - self.settings.answers
            return self.record[number] if is_kept else "error"
        is_known = number in self.wanted
        return "open" if is_known or number <= self.next + self.settings.window else "error"

    def may_start(self) -> int | None:
        return self.next if self.running is None and self.next in self.wanted else None

    def renew(self, number: int) -> list[Ticket]:
        """Restart the session and return the tickets to notify."""
        refused = [t for n, tickets in self.wanted.items() if n != self.running or self.is_stale for t in tickets]
        if self.running is not None and not self.is_stale:
            self.stale, self.is_stale = self.wanted[self.running], True
        self.first = self.next = number
        self.record, self.wanted = {}, {}
        return refused


class Walk:
    """Random events on one session, each compared with `Plain`."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.sent = Sent(window=self.rng.choice([1, 3, 8]), answers=self.rng.choice([0, 1, 4]))
        self.plain = Plain(self.sent.settings)
        self.texts = 0

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.55:
            self.arrive()
        elif draw < 0.85:
            self.finish()
        elif draw < 0.97:
            self.leave()
        else:
            self.renew()
        self.check()

    def arrive(self) -> None:
        number = max(1, self.plain.next + self.rng.randint(-6, 10))
        expected = self.plain.arrival(number)
        if expected == "error":
            with pytest.raises(SessionError):
                self.sent.send(number)
            return
        ticket = self.sent.send(number)
        if expected == "open":
            assert ticket not in self.sent.given
            self.plain.wanted.setdefault(number, []).append(ticket)
            self.start()
        else:
            assert self.sent.given[ticket].is_repeat
            assert self.told(ticket) == expected

    def start(self) -> None:
        self.plain.running = self.plain.running or self.plain.may_start()

    def finish(self) -> None:
        plain = self.plain
        if plain.running is None:
            return
        self.texts += 1
        text = str(self.texts)
        kind = self.rng.choice(["ok", "ok", "conclusive", "open"])
        outcomes: dict[str, InferResponse | PenstockError] = {
            "ok": response(text),
            "conclusive": EngineFailed(text),
            "open": QueueFull(text),
        }
        if plain.is_stale:
            expected, plain.stale, plain.is_stale = plain.stale, [], False
        else:
            expected = plain.wanted.pop(plain.running)
            if kind != "open":
                plain.record[plain.running] = text
                plain.next = plain.running + 1
        plain.running = None
        self.start()
        self.sent.finish(outcomes[kind])
        assert [self.told(ticket) for ticket in expected] == [text] * len(expected)

    def leave(self) -> None:
        plain = self.plain
        groups = [*plain.wanted.items(), *([(0, plain.stale)] if plain.stale else [])]
        if not groups:
            return
        number, tickets = self.rng.choice(groups)
        if not tickets:
            return
        ticket = tickets.pop(self.rng.randrange(len(tickets)))
        is_running = number == 0 or (number == plain.running and not plain.is_stale)
        if not tickets and not is_running:
            del plain.wanted[number]
        self.sent.leave(ticket)
        assert ticket not in self.sent.given

    def renew(self) -> None:
        number = self.plain.next + self.rng.randint(20, 30)  # a ticket that the session never saw
        if not (self.plain.wanted or self.plain.record):
            return  # the table may have forgotten a session that never ran
        was_first = not self.plain.record and self.plain.running is None and self.plain.first == 1
        if was_first:
            return  # nothing ran yet: then a start sets the first number, which is tested above
        refused = self.plain.renew(number)
        ticket = self.sent.send(number, start=True, digest=b"x")
        self.plain.wanted[number] = [ticket]
        self.start()
        assert {type(self.sent.given[each].outcome) for each in refused} <= {SessionError}

    def check(self) -> None:
        plain, sent = self.plain, self.sent
        assert len(sent.running) == (plain.running is not None)
        if plain.running is not None and not plain.is_stale:
            assert sent.numbers() == [plain.running] == [plain.next]
        waits = [number for number in plain.wanted if number != plain.running or plain.is_stale]
        assert sent.table.count_waiting_steps() == len(waits)

    def told(self, ticket: Ticket) -> str:
        outcome = self.sent.given[ticket].outcome
        if isinstance(outcome, PenstockError):
            return outcome.message
        assert isinstance(outcome, InferResponse)
        return outcome.request_id


@pytest.mark.parametrize("seed", range(60))
def test_random_events_give_the_specified_results(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(400):
        walk.step()
    assert len(walk.sent.given) > 5
