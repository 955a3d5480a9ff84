"""The measurements of tuning, and the conclusions from these measurements. Pure: no I/O.

Every round includes a window of the shipped configuration. A candidate's result is the ratio to this window, so that a
slow minute of the machine affects both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import median

from penstock.experiments.tuning.space import Configuration

STANDARD_ERRORS = 3.0  # standard errors that a difference must exceed
MIN_LEAD = 0.03  # smaller differences never count
MEDIAN_ERROR_FACTOR = 1.2533  # ratio of the standard errors of a median and a mean
DEVIATION_PER_MEDIAN_DISTANCE = (
    1.4826  # ratio of the standard deviation and the median distance of a normal distribution
)
DEFAULT_NOISE = 0.10  # assumed noise of a window until there are two rounds


@dataclass(frozen=True, slots=True)
class Measure:
    rate: float  # items per second
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Lead:
    """The speed-up of one configuration over another, in the rounds that measured both."""

    ratio: float  # ratio of their throughput, or of 1/p99
    noise: float  # the ratio counts only if it differs from 1 by more than this share

    @property
    def is_better(self) -> bool:
        return self.ratio > 1 + self.noise


@dataclass(slots=True)
class Trials:
    shipped: Configuration
    bound_ms: float | None = None  # maximum p99
    rounds: list[tuple[str, dict[Configuration, Measure]]] = field(default_factory=list)  # with the name of the stage
    refused: dict[Configuration, str] = field(default_factory=dict)  # configurations that cannot win, with the reason

    def add(self, stage: str, measures: Mapping[Configuration, Measure]) -> None:
        self.rounds.append((stage, dict(measures)))

    def measured(self, stage: str = "") -> list[Configuration]:
        found = (candidate for measures in self._rounds_of(stage) for candidate in measures)
        return [candidate for candidate in dict.fromkeys(found) if candidate not in self.refused]

    def measures(self, candidate: Configuration, stage: str = "") -> list[Measure]:
        return [measures[candidate] for measures in self._rounds_of(stage) if candidate in measures]

    def list_tried(self) -> list[Configuration]:
        return list(dict.fromkeys(candidate for _, measures in self.rounds for candidate in measures))

    def rate(self, candidate: Configuration) -> float:
        return median([measure.rate for measure in self.measures(candidate)] or [0.0])

    def ratio(self, candidate: Configuration) -> float:
        return exp(self.gain(candidate))

    def gain(self, candidate: Configuration, stage: str = "") -> float:
        """Return the logarithm of the candidate's throughput divided by the shipped configuration's throughput."""
        return median(self._log_ratios(candidate, self.shipped, stage) or [0.0])

    def p99_ms(self, candidate: Configuration, stage: str = "") -> float:
        return median([measure.p99_ms for measure in self.measures(candidate, stage)] or [float("inf")])

    def is_within(self, candidate: Configuration, stage: str = "") -> bool:
        return self.bound_ms is None or self.p99_ms(candidate, stage) <= self.bound_ms

    def rank(self, candidates: Iterable[Configuration], stage: str = "") -> list[Configuration]:
        """Sort candidates: first the candidates within the bound, by throughput, then the others, by p99."""

        def key(candidate: Configuration) -> tuple[bool, float]:
            is_within = self.is_within(candidate, stage)
            return (not is_within, -self.gain(candidate, stage) if is_within else self.p99_ms(candidate, stage))

        return sorted(candidates, key=key)

    def noise(self) -> float:
        """Return the relative standard deviation of the ratio between two windows of one round."""
        groups = [
            self._log_ratios(candidate, self.shipped) for candidate in self.measured() if candidate != self.shipped
        ]
        found = _estimate_deviation(groups)
        return DEFAULT_NOISE if found is None else exp(found) - 1

    def compare(self, candidate: Configuration, rival: Configuration, stage: str, by_p99: bool = False) -> Lead:
        logs = self._log_ratios(candidate, rival, stage, by_p99)
        if not logs:
            return Lead(1.0, float("inf"))
        every = [
            self._log_ratios(each, self.shipped, stage, by_p99) for each in self.measured(stage) if each != self.shipped
        ]
        spread = _estimate_deviation([*every, logs])
        error = MEDIAN_ERROR_FACTOR * (log(1 + DEFAULT_NOISE) if spread is None else spread) / sqrt(len(logs))
        return Lead(exp(median(logs)), max(MIN_LEAD, exp(STANDARD_ERRORS * error) - 1))

    def _rounds_of(self, stage: str) -> list[dict[Configuration, Measure]]:
        return [measures for name, measures in self.rounds if not stage or name == stage]

    def _log_ratios(
        self, candidate: Configuration, rival: Configuration, stage: str = "", by_p99: bool = False
    ) -> list[float]:
        pairs = [
            (found[candidate], found[rival])
            for found in self._rounds_of(stage)
            if candidate in found and rival in found
        ]
        if by_p99:
            return [log(theirs.p99_ms / ours.p99_ms) for ours, theirs in pairs]
        return [log(ours.rate / theirs.rate) for ours, theirs in pairs]


def _estimate_deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the pooled standard deviation within groups, or None if no group has two values.

    The estimate uses the median of distances, so that a window disturbed by other work has little influence.
    """
    known = [values for values in groups if len(values) > 1]
    distances = [abs(value - median(values)) for values in known for value in values]
    if not known:
        return None
    return DEVIATION_PER_MEDIAN_DISTANCE * median(distances) * sqrt(len(distances) / (len(distances) - len(known)))
