"""Records of sessions in this process, for the gateways in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.features.sessions.session_store import StepRow, TakenSession


@dataclass(slots=True)
class _Row:
    epoch: int = 0
    owner: str = ""
    life: int = 0
    next: int = 0
    begun: int = 0
    state: bytes = b""
    answers: dict[int, bytes] = field(default_factory=dict)
    expires: float = 0.0


class MemorySessionStore:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[str, _Row] = {}

    async def close(self) -> None: ...

    async def take(self, key: str, owner: str, ttl_s: float, instead_of: int = 0) -> TakenSession:
        self._expire()
        row = self._rows.get(key) or _Row()
        if row.owner and row.owner != owner and row.epoch != instead_of:
            return TakenSession(row.epoch, row.owner)
        self._rows[key] = row
        row.epoch += 1
        row.owner = owner
        row.expires = self._clock() + ttl_s
        return TakenSession(row.epoch, "", row.state, row.begun, dict(row.answers))

    async def move(self, key: str, to: str) -> bool:
        self._expire()
        if key not in self._rows or to in self._rows:
            return False
        row = self._rows[to] = self._rows.pop(key)
        row.owner = ""
        return True

    async def begin(self, key: str, step: StepRow, ttl_s: float) -> bool:
        row = self._rows.get(key)
        if row is None or row.epoch != step.epoch or (row.life == step.life and row.next > step.number):
            return False
        if row.life != step.life:
            row.life, row.answers = step.life, {}
        row.next = row.begun = step.number
        row.state, row.expires = step.state, self._clock() + ttl_s
        return True

    async def end(self, key: str, step: StepRow, ttl_s: float) -> bool:
        row = self._rows.get(key)
        if row is None or row.epoch != step.epoch or row.begun != step.number:
            return False
        row.next, row.begun, row.state, row.expires = step.number + 1, 0, step.state, self._clock() + ttl_s
        if step.answer:
            row.answers[step.number] = step.answer
        row.answers.pop(step.number - step.answers, None)
        return True

    async def release(self, key: str, epoch: int) -> None:
        row = self._rows.get(key)
        if row is not None and row.epoch == epoch:
            row.owner = ""

    def _expire(self) -> None:
        for key in [key for key, row in self._rows.items() if row.expires <= self._clock()]:
            del self._rows[key]
