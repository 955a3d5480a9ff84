"""What tuning measures next, from what it has measured, and which configuration it chooses. Decides; never acts.

Variants come first, with the shipped batching; then, around the best, one setting after another. The contenders of a
stage take turns in rounds. The best few and the shipped one meet once more in the finals, whose rounds alone decide:
what won a stage by luck does not win again.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log

from penstock.experiments.kept import Kept
from penstock.experiments.tuning.space import Configuration, Space, Variant
from penstock.experiments.tuning.trials import Measure, Trials

VARIANTS, FINALS = "variants", "finals"
FINALISTS = 3  # beside the shipped one
FEWEST_FINAL_ROUNDS, MOST_FINAL_ROUNDS = 4, 15
STAGE_ROUNDS = {VARIANTS: 3}  # else 2
SHARE = 0.6  # of the time before the finals that one stage may take
HOPELESS = (log(1.6), log(1.3))  # so far behind the best after one round, or two: no further one
RIVAL = log(1.15)  # a second variant as near as this to the best is followed, too


@dataclass(frozen=True, slots=True)
class Pace:
    """What measuring costs."""

    budget_s: float
    window_s: float  # of one window with its warm-up
    start_s: float  # of a server
    most_servers: int = 8  # at a time


@dataclass(frozen=True, slots=True)
class Round:
    """Windows to take one after another, in this order."""

    stage: str
    contenders: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a round."""

    measures: Mapping[Configuration, Measure]
    left_s: float
    failed: Mapping[Configuration, str] = field(default_factory=dict)
    start_s: float | None = None  # of a server, as it was


class Final(Kept):
    configuration: Configuration
    rate: float
    p99_ms: float
    over_shipped: float  # the median of the rounds' ratios: of throughput, or of 1/p99 where no bound was met
    noise: float  # a lead that is not larger counts for nothing
    lead_of_best: float
    is_equal: bool  # to the best, within noise
    is_within: bool  # the bound on p99


@dataclass(frozen=True, slots=True)
class Decision:
    winner: Configuration
    best: Configuration  # the fastest; the winner is its equal within noise, and nearer to what is shipped
    is_met: bool  # the bound on p99
    finals: tuple[Final, ...]


class TuneSearch:
    def __init__(
        self, space: Space, bound_ms: float | None, pace: Pace, accuracies: Mapping[Variant, float] | None = None
    ) -> None:
        """Where the shipped variant is none of the space's, what is shipped is measured and not chosen."""
        self._space = space
        self._pace = pace
        self._left_s = pace.budget_s
        self.trials = Trials(space.shipped, bound_ms)
        self._accuracies = accuracies or {}
        if space.shipped.variant not in space.variants:
            self.trials.refused[space.shipped] = "its accuracy is below the objective"
        self.untried: dict[Configuration, str] = {}

    def rounds(self) -> Generator[Round, Told, Decision]:
        shipped = self._space.shipped
        yield from self._stage(VARIANTS, [self._space.start(each) for each in self._space.variants])
        front = self._front()
        for axis in self._space.axes(shipped):
            options = [option for each in front for option in self._space.axes(each)[axis]]
            if options:
                yield from self._stage(axis, [*front, *options])
                front = self._front()
            if axis != "instances and threads":
                front = front[:1]  # the second best has its place in the finals
        yield from self._finals()
        return self._decide()

    def _stage(self, name: str, contenders: Sequence[Configuration]) -> Generator[Round, Told, None]:
        shipped = self._space.shipped
        wanted = [each for each in dict.fromkeys(contenders) if each != shipped and each not in self.trials.refused]
        wanted = self._affordable(name, wanted)
        size = self._pace.most_servers - 1
        for start in range(0, len(wanted), size):
            group = [shipped, *wanted[start : start + size]]
            for number in range(STAGE_ROUNDS.get(name, 2)):
                group = [each for each in group if self._is_worth(each, group, number)]
                if len(group) < 2 and number:
                    break
                yield from self._round(name, group, number)

    def _affordable(self, name: str, wanted: list[Configuration]) -> list[Configuration]:
        """The first of them, as many as there is time for; those measured before are what they are held against."""
        known = [each for each in wanted if self.trials.measures(each)]
        new = [each for each in wanted if each not in known]
        finals_s = (FINALISTS + 1) * FEWEST_FINAL_ROUNDS * self._pace.window_s
        free_s = (self._left_s - finals_s) * SHARE
        rounds = STAGE_ROUNDS.get(name, 2)
        free_s -= (1 + len(known)) * rounds * self._pace.window_s
        count = max(0, int(free_s / (self._pace.start_s + rounds * self._pace.window_s)))
        if not self.trials.rounds:
            count = max(1, count)  # something must be tried
        for each in new[count:]:
            self.untried[each] = "no time was left"
        return [*known, *new[:count]] if new[:count] else []

    def _is_worth(self, each: Configuration, group: Sequence[Configuration], number: int) -> bool:
        """Whether a contender is worth another window."""
        trials = self.trials
        if each == self._space.shipped or not number:
            return True
        if each in trials.refused or not trials.measures(each):
            return False
        best = max(trials.gain(other) for other in group if trials.measures(other))
        may_matter = trials.bound_ms is not None and trials.is_within(each)
        return may_matter or trials.gain(each) > best - HOPELESS[min(number, len(HOPELESS)) - 1]

    def _round(self, stage: str, group: Sequence[Configuration], number: int) -> Generator[Round, Told, None]:
        # Every other round backwards: nobody always follows the same neighbour.
        order = tuple(group) if number % 2 == 0 else tuple(reversed(group))
        told = yield Round(stage, order)
        self._left_s = told.left_s
        if told.start_s is not None:
            self._pace = replace(self._pace, start_s=told.start_s)
        self.trials.refused.update(told.failed)
        self.trials.add(stage, {each: found for each, found in told.measures.items() if found.rate > 0})

    def _front(self) -> list[Configuration]:
        """The best, and the best of another variant where it is near."""
        ranked = self.trials.rank(self.trials.measured())
        if not ranked:
            return [self._space.shipped]
        best = ranked[0]
        rivals = [each for each in ranked if each.variant != best.variant]
        near = [each for each in rivals if self.trials.gain(each) > self.trials.gain(best) - RIVAL]
        return [best, *near[:1]]

    def _finalists(self) -> list[Configuration]:
        """The best; those that may equal it with fewer changes; and the next best."""
        trials = self.trials
        ranked = [each for each in trials.rank(trials.measured()) if each != self._space.shipped]
        if not ranked:
            return []
        best = ranked[0]
        least = trials.gain(best) - RIVAL
        near = [each for each in ranked if each.variant == best.variant or trials.gain(each) > least]
        simpler = sorted((each for each in near if self._burden(each) < self._burden(best)), key=self._burden)
        quickest = min(ranked, key=trials.p99_ms)
        first = [best, quickest] if trials.bound_ms is not None else [best]
        hopeful = [each for each in ranked if trials.gain(each) > trials.gain(best) - HOPELESS[0]]
        return list(dict.fromkeys([*first, *simpler[:1], *hopeful]))[:FINALISTS]

    def _burden(self, each: Configuration) -> tuple[int, float]:
        """What is to be preferred among equals: fewer changes, then more accuracy."""
        return each.differences(self._space.shipped), -self._accuracies.get(each.variant, 0.0)

    def _finals(self) -> Generator[Round, Told, None]:
        finalists = self._finalists()
        if not finalists:
            return
        group = [self._space.shipped, *finalists]
        fitting = int(self._left_s / (len(group) * self._pace.window_s))
        count = max(FEWEST_FINAL_ROUNDS, min(MOST_FINAL_ROUNDS, fitting))
        for number in range(count):
            if number >= FEWEST_FINAL_ROUNDS and self._left_s < len(group) * self._pace.window_s:
                break
            group = [each for each in group if each == self._space.shipped or each not in self.trials.refused]
            yield from self._round(FINALS, group, number)

    def _decide(self) -> Decision:
        trials, shipped = self.trials, self._space.shipped
        met = trials.measured(FINALS) or [shipped]
        within = [each for each in met if trials.is_within(each, FINALS)]
        is_met = bool(within)
        choices = within or met
        best = trials.rank(choices, FINALS)[0]
        finals = tuple(self._final(each, best, by_p99=not is_met) for each in trials.rank(met, FINALS))
        equals = [each.configuration for each in finals if each.is_equal and each.configuration in choices]
        return Decision(min(equals, key=self._burden), best, is_met, finals)

    def _final(self, each: Configuration, best: Configuration, by_p99: bool) -> Final:
        trials = self.trials
        measures = trials.measures(each, FINALS)
        lead = trials.compare(best, each, FINALS, by_p99)
        return Final(
            configuration=each,
            rate=round(sum(measure.rate for measure in measures) / len(measures), 2) if measures else 0.0,
            p99_ms=round(trials.p99_ms(each, FINALS), 2),
            over_shipped=round(trials.compare(each, self._space.shipped, FINALS, by_p99).ratio, 4),
            noise=round(lead.noise, 4),
            lead_of_best=round(lead.ratio, 4),
            is_equal=each == best or not lead.is_better,
            is_within=trials.is_within(each, FINALS),
        )
