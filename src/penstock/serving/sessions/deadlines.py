"""The deadlines of those who wait in sessions, earliest first. Decides only."""

import heapq
from collections.abc import Iterator

from penstock.serving.sessions.parts import Ticket

SWEEP = 1000  # entries, beyond those still wanted, at which the others are thrown out


class TicketDeadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []
        self._number = 0  # keeps tickets of one deadline in order
        self._sweep_at = SWEEP

    def watch(self, ticket: Ticket) -> None:
        self._number += 1
        heapq.heappush(self._heap, (ticket.deadline, self._number, ticket))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2].step is not None]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + SWEEP

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> Iterator[Ticket]:
        """The tickets whose step waits, or runs with more time than they have; others hear from the run itself."""
        while self._heap and self._heap[0][0] <= now:
            ticket = heapq.heappop(self._heap)[2]
            step = ticket.step
            if step is not None and (not step.is_running or ticket.deadline < step.deadline):
                yield ticket
