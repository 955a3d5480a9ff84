"""The progress of a run, and an estimate of the time that is left."""

import sys
import time
from collections.abc import Sequence

from benchmarks.peers.plan import PeerTurn
from benchmarks.peers.results import Record


class Progress:
    def __init__(self, turns: Sequence[PeerTurn]) -> None:
        self._left = list(turns)
        self._count = len(turns)
        self._started = time.monotonic()
        self._planned_s = 0.0  # planned time of completed turns

    def add(self, turns: Sequence[PeerTurn]) -> None:
        self._left += turns
        self._count += len(turns)

    def begin(self, turn: PeerTurn) -> None:
        contender = turn.contender
        what = ", ".join(part for part in (contender.kind, contender.setting_name) if part)
        number = self._count - len(self._left) + 1
        place = f"[{number}/{self._count}] {turn.group.name}, round {turn.number + 1}"
        self._say(f"{place}: {contender.title}{f' ({what})' if what else ''}")

    def end(self, turn: PeerTurn, record: Record | None) -> None:
        """End a turn; without a record the turn was skipped."""
        self._left.remove(turn)
        if record is None:
            return
        self._planned_s += turn.planned_s
        rates = ", ".join(f"{row.protocol} {row.load} c{row.concurrency} {row.rps:.1f}/s" for row in record.rows)
        failure = f"FAILED: {record.failure}" if record.failure else record.refusal
        self._say("    " + "; ".join(part for part in (failure, rates) if part))
        self._say(f"    about {self._left_s() / 60:.0f} min left")

    def _left_s(self) -> float:
        """Return the planned time that is left, scaled by the ratio of measured to planned time so far."""
        planned_s = sum(turn.planned_s for turn in self._left)
        took_s = time.monotonic() - self._started
        return planned_s * (took_s / self._planned_s if self._planned_s else 1.0)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
