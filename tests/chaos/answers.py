"""Counts the answers to malformed messages by kind, and keeps samples of forbidden answers."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

HANG_S = 5.0
SAMPLES = 8


@dataclass(slots=True)
class AttackAnswers:
    sent: int = 0
    hangs: int = 0
    crashes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)

    def record_typed(self, kind: str) -> None:
        self.sent += 1
        self.kinds[kind] += 1

    def record_crash(self, kind: str, sample: object) -> None:
        self.crashes += 1
        self._keep(kind, sample)

    def record_hang(self, kind: str, sample: object) -> None:
        self.hangs += 1
        self._keep(f"{kind} hang", sample)

    def details(self) -> dict[str, Any]:
        return {"sent": self.sent, "kinds": dict(self.kinds.most_common()), "samples": self.samples}

    def _keep(self, kind: str, sample: object) -> None:
        self.record_typed(kind)
        if len(self.samples) < SAMPLES:
            self.samples.append(f"{kind}: {sample!r:.400}")
