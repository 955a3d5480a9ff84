"""When a measurement may stop: three windows in a row that agree."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.experiments.load.latencies import Latencies, merge
from penstock.experiments.load.process import Outcome

AGREEING = 3
WITHIN = 0.10


@dataclass(frozen=True, slots=True)
class Measured:
    """The last three windows, or all of the last three that there were."""

    windows: Sequence[Outcome]
    is_steady: bool

    @property
    def rps(self) -> float:
        seconds = sum(window.seconds for window in self.windows)
        return sum(window.answered for window in self.windows) / seconds if seconds else 0.0

    @property
    def latencies(self) -> Latencies:
        return merge(window.latencies for window in self.windows)

    @property
    def rejected(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for window in self.windows:
            for code, count in window.rejected.items():
                found[code] = found.get(code, 0) + count
        return found

    @property
    def cpu_share(self) -> float:
        return max(window.cpu_share for window in self.windows)

    @property
    def spread(self) -> float:
        return spread([window.rps for window in self.windows])


def is_steady(outcomes: Sequence[Outcome], within: float = WITHIN) -> bool:
    """The last three agree in requests a second and in the median latency."""
    last = outcomes[-AGREEING:]
    if len(last) < AGREEING or not all(outcome.answered for outcome in last):
        return False
    rates = [outcome.rps for outcome in last]
    medians = [outcome.latencies.percentile_ms(50) for outcome in last]
    return spread(rates) <= within and spread(medians) <= within


def is_enough(outcomes: Sequence[Outcome]) -> bool:
    """Steady, or hopeless: all that was sent in the last window was refused."""
    last = outcomes[-1]
    return is_steady(outcomes) or (not last.answered and bool(last.rejected))


def spread(values: Sequence[float]) -> float:
    """The furthest value's distance from the mean, as a share of it."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def measured(outcomes: Sequence[Outcome]) -> Measured:
    return Measured(outcomes[-AGREEING:], is_steady(outcomes))
