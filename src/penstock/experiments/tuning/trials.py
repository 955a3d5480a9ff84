"""What tuning has measured, and what may be concluded from it. Decides; never acts.

Every round has a window of the shipped configuration, and a candidate's figure is its ratio to that: a slow minute of
the machine is in both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import median

from penstock.experiments.tuning.space import Configuration

ERRORS = 3.0  # standard errors that a difference must exceed
LEAST = 0.03  # a difference below it never counts
MEDIAN = 1.2533  # the standard error of a median over that of a mean
NORMAL = 1.4826  # a standard deviation over the median of distances
NOISE_UNKNOWN = 0.10  # of a window, until two rounds tell


@dataclass(frozen=True, slots=True)
class Measure:
    rate: float  # items a second
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Lead:
    """Of one candidate over another, in the rounds that have both."""

    ratio: float  # of their throughput, or of the inverse of their p99
    noise: float  # as a share: what the ratio must differ from 1 by to count

    @property
    def is_better(self) -> bool:
        return self.ratio > 1 + self.noise


@dataclass(slots=True)
class Trials:
    shipped: Configuration
    bound_ms: float | None = None  # the most throughput is looked for where p99 stays within it
    rounds: list[tuple[str, dict[Configuration, Measure]]] = field(default_factory=list)  # with their stage's name
    refused: dict[Configuration, str] = field(default_factory=dict)  # why it cannot be chosen

    def add(self, stage: str, measures: Mapping[Configuration, Measure]) -> None:
        self.rounds.append((stage, dict(measures)))

    def measured(self, stage: str = "") -> list[Configuration]:
        found = (candidate for measures in self._in(stage) for candidate in measures)
        return [candidate for candidate in dict.fromkeys(found) if candidate not in self.refused]

    def measures(self, candidate: Configuration, stage: str = "") -> list[Measure]:
        return [measures[candidate] for measures in self._in(stage) if candidate in measures]

    def seen(self) -> list[Configuration]:
        """Refused ones too, where they were measured."""
        return list(dict.fromkeys(candidate for _, measures in self.rounds for candidate in measures))

    def rate(self, candidate: Configuration) -> float:
        return median([measure.rate for measure in self.measures(candidate)] or [0.0])

    def ratio(self, candidate: Configuration) -> float:
        return exp(self.gain(candidate))

    def gain(self, candidate: Configuration, stage: str = "") -> float:
        """The logarithm of its throughput over the shipped one's."""
        return median(self._logs(candidate, self.shipped, stage) or [0.0])

    def p99_ms(self, candidate: Configuration, stage: str = "") -> float:
        return median([measure.p99_ms for measure in self.measures(candidate, stage)] or [float("inf")])

    def is_within(self, candidate: Configuration, stage: str = "") -> bool:
        return self.bound_ms is None or self.p99_ms(candidate, stage) <= self.bound_ms

    def rank(self, candidates: Iterable[Configuration], stage: str = "") -> list[Configuration]:
        """The best first: those within the bound by throughput, then the others by how near they come to it."""

        def key(candidate: Configuration) -> tuple[bool, float]:
            is_within = self.is_within(candidate, stage)
            return (not is_within, -self.gain(candidate, stage) if is_within else self.p99_ms(candidate, stage))

        return sorted(candidates, key=key)

    def noise(self) -> float:
        """The standard deviation of a ratio between two windows of one round, as a share."""
        groups = [self._logs(candidate, self.shipped) for candidate in self.measured() if candidate != self.shipped]
        found = _deviation(groups)
        return NOISE_UNKNOWN if found is None else exp(found) - 1

    def compare(self, one: Configuration, other: Configuration, stage: str, by_p99: bool = False) -> Lead:
        logs = self._logs(one, other, stage, by_p99)
        if not logs:
            return Lead(1.0, float("inf"))
        every = [self._logs(each, self.shipped, stage, by_p99) for each in self.measured(stage) if each != self.shipped]
        spread = _deviation([*every, logs])
        error = MEDIAN * (log(1 + NOISE_UNKNOWN) if spread is None else spread) / sqrt(len(logs))
        return Lead(exp(median(logs)), max(LEAST, exp(ERRORS * error) - 1))

    def _in(self, stage: str) -> list[dict[Configuration, Measure]]:
        return [measures for name, measures in self.rounds if not stage or name == stage]

    def _logs(self, one: Configuration, other: Configuration, stage: str = "", by_p99: bool = False) -> list[float]:
        pairs = [(found[one], found[other]) for found in self._in(stage) if one in found and other in found]
        if by_p99:
            return [log(theirs.p99_ms / ours.p99_ms) for ours, theirs in pairs]
        return [log(ours.rate / theirs.rate) for ours, theirs in pairs]


def _deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation within groups, over all of them; None where none has two values.

    From the median of distances: a window that somebody else's work has spoiled does not count for more than another.
    """
    known = [values for values in groups if len(values) > 1]
    distances = [abs(value - median(values)) for values in known for value in values]
    if not known:
        return None
    return NORMAL * median(distances) * sqrt(len(distances) / (len(distances) - len(known)))
