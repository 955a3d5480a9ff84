"""The pause before a process that ended is restarted."""

from dataclasses import dataclass

HEALTHY_S = 10.0  # a process that ran for this long resets the backoff


@dataclass(slots=True)
class Backoff:
    first_s: float
    max_s: float
    wait_s: float = 0.0  # the latest pause

    def compute_next_wait_s(self, ran_s: float) -> float:
        grown_s = 2 * self.wait_s if ran_s < HEALTHY_S else 0.0
        self.wait_s = min(self.max_s, max(self.first_s, grown_s))
        return self.wait_s
