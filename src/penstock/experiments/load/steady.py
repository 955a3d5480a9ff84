"""When a measurement may stop: three windows in a row that agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.experiments.load.latencies import Latencies, merge
from penstock.experiments.load.process import WindowOutcome, sum_refusals

AGREEING = 3
WITHIN = 0.10


class NothingAnswered(Exception):
    """The server refused every request; its message counts why."""

    def __init__(self, rejected: Mapping[str, int]) -> None:
        counts = count_refusals(rejected)
        super().__init__(f"every request was refused: {counts}" if counts else "no request was answered in time")


def count_refusals(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {code}" for code, count in sorted(rejected.items()))


@dataclass(frozen=True, slots=True)
class Measured:
    """The windows that count, and whether they agreed."""

    windows: Sequence[WindowOutcome]
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
        return sum_refusals(window.rejected for window in self.windows)

    @property
    def cpu_share(self) -> float:
        return max(window.cpu_share for window in self.windows)

    @property
    def spread(self) -> float:
        return spread([window.rps for window in self.windows])


def is_steady(outcomes: Sequence[WindowOutcome], within: float = WITHIN) -> bool:
    """The last three agree in requests a second and in the median latency."""
    last = outcomes[-AGREEING:]
    if len(last) < AGREEING or not all(outcome.answered for outcome in last):
        return False
    rates = [outcome.rps for outcome in last]
    medians = [outcome.latencies.percentile_ms(50) for outcome in last]
    return spread(rates) <= within and spread(medians) <= within


def is_enough(outcomes: Sequence[WindowOutcome]) -> bool:
    """Steady, or hopeless: all that was sent in the last window was refused."""
    last = outcomes[-1]
    return is_steady(outcomes) or (not last.answered and bool(last.rejected))


def spread(values: Sequence[float]) -> float:
    """The furthest value's distance from the mean, as a share of it."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def measured(outcomes: Sequence[WindowOutcome]) -> Measured:
    return Measured(outcomes[-AGREEING:], is_steady(outcomes))
