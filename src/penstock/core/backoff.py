"""How long to wait before a process that ended is started again. Decides; never sleeps."""

from dataclasses import dataclass

HEALTHY_S = 10.0  # a process that lived so long starts its backoff anew


@dataclass(slots=True)
class Backoff:
    first_s: float
    max_s: float
    wait_s: float = 0.0  # the last

    def died(self, lived_s: float) -> float:
        grown_s = 2 * self.wait_s if lived_s < HEALTHY_S else 0.0
        self.wait_s = min(self.max_s, max(self.first_s, grown_s))
        return self.wait_s
