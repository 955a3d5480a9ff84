"""Decide when a measurement is steady: when three windows in a row have similar throughput and latency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.experiments.load.load_process import WindowOutcome

AGREEING = 3
WITHIN = 0.10


class NothingAnswered(Exception):
    """The server refused every request; the message counts the refusals by reason."""

    def __init__(self, rejected: Mapping[str, int]) -> None:
        counts = count_refusals(rejected)
        super().__init__(f"every request was refused: {counts}" if counts else "every request timed out")


def count_refusals(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {code}" for code, count in sorted(rejected.items()))


@dataclass(slots=True)
class Measured(WindowOutcome):
    """The sum of the windows that the result is based on, and whether these windows agreed."""

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


def is_steady(outcomes: Sequence[WindowOutcome], tolerance: float = WITHIN) -> bool:
    last = outcomes[-AGREEING:]
    return len(last) == AGREEING and do_windows_agree(last, tolerance)


def do_windows_agree(parts: Sequence[WindowOutcome], tolerance: float = WITHIN) -> bool:
    """Return True if throughput and median latency of the windows differ by at most `tolerance`.

    For generated text, compare tokens per second and the median time between tokens.
    """
    rates = [part.pace for part in parts]
    medians = [part.median_ms for part in parts]
    return all(rates) and spread(rates) <= tolerance and spread(medians) <= tolerance


def has_enough_windows(outcomes: Sequence[WindowOutcome]) -> bool:
    return is_steady(outcomes) or is_refusing_all(outcomes)


def is_refusing_all(outcomes: Sequence[WindowOutcome]) -> bool:
    """Return True if the server refused every request of the last window."""
    return not outcomes[-1].answered and not outcomes[-1].pace and bool(outcomes[-1].rejected)


def spread(values: Sequence[float]) -> float:
    """Return the distance of the furthest value from the mean, divided by the mean."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def measured(outcomes: Sequence[WindowOutcome]) -> Measured:
    return Measured.of(outcomes[-AGREEING:], is_steady(outcomes))
