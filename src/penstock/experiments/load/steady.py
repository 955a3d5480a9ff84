"""When a measurement may stop: three windows in a row that agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.experiments.load.process import WindowOutcome

AGREEING = 3
WITHIN = 0.10


class NothingAnswered(Exception):
    """The server refused every request; its message counts why."""

    def __init__(self, rejected: Mapping[str, int]) -> None:
        counts = count_refusals(rejected)
        super().__init__(f"every request was refused: {counts}" if counts else "no request was answered in time")


def count_refusals(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {code}" for code, count in sorted(rejected.items()))


@dataclass(slots=True)
class Measured(WindowOutcome):
    """The windows that count, taken together, and whether they agreed."""

    windows: Sequence[WindowOutcome] = ()
    is_steady: bool = False

    @classmethod
    def of(cls, windows: Sequence[WindowOutcome], is_steady: bool) -> "Measured":
        seconds = sum(window.seconds for window in windows)
        whole = cls(seconds, processes=windows[0].processes, windows=windows, is_steady=is_steady)
        for window in windows:
            whole.add(window)
        return whole

    @property
    def cpu_share(self) -> float:
        return max(window.cpu_share for window in self.windows)

    @property
    def spread(self) -> float:
        return spread([window.pace for window in self.windows])


def is_steady(outcomes: Sequence[WindowOutcome], within: float = WITHIN) -> bool:
    last = outcomes[-AGREEING:]
    return len(last) == AGREEING and agree(last, within)


def agree(parts: Sequence[WindowOutcome], within: float = WITHIN) -> bool:
    """In requests a second and the median latency; of generated text in tokens a second and the time between them."""
    rates = [part.pace for part in parts]
    medians = [part.median_ms for part in parts]
    return all(rates) and spread(rates) <= within and spread(medians) <= within


def is_enough(outcomes: Sequence[WindowOutcome]) -> bool:
    return is_steady(outcomes) or is_hopeless(outcomes)


def is_hopeless(outcomes: Sequence[WindowOutcome]) -> bool:
    """All that was sent in the last window was refused."""
    return not outcomes[-1].answered and not outcomes[-1].pace and bool(outcomes[-1].rejected)


def spread(values: Sequence[float]) -> float:
    """The furthest value's distance from the mean, as a share of it."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def measured(outcomes: Sequence[WindowOutcome]) -> Measured:
    return Measured.of(outcomes[-AGREEING:], is_steady(outcomes))
