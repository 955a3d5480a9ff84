"""Choose the configurations that tuning measures next, and the winner. Pure: no I/O.

The first stage compares variants with the shipped batching. The next stages vary one setting after another around the
best configuration. The configurations of a stage take turns in rounds. The finals measure the best few configurations
and the shipped configuration again. Only the finals decide, so that a configuration that won a stage by luck does not
win.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log

from penstock.experiments.stored_file import StoredModel
from penstock.experiments.tuning.space import Configuration, Space, Variant
from penstock.experiments.tuning.trials import Measure, Trials

VARIANTS, FINALS = "variants", "finals"
MAX_FINALISTS = 3  # in addition to the shipped configuration
MIN_FINAL_ROUNDS, MAX_FINAL_ROUNDS = 4, 15
STAGE_ROUNDS = {VARIANTS: 3}  # all other stages have 2
MAX_STAGE_SHARE = 0.6  # maximum share of the time before the finals for one stage
HOPELESS_GAPS = (
    log(1.6),
    log(1.3),
)  # log ratio to the best, after one and two rounds, that ends a trial
RIVAL_GAP = log(1.15)  # log ratio to the best up to which a second variant is also developed further


@dataclass(frozen=True, slots=True)
class Pace:
    """The time budget of a tuning run, and the time that each measurement takes."""

    budget_s: float
    window_s: float  # time of a window with its warm-up
    start_s: float  # time to start a server
    max_servers: int = 8  # maximum number of servers at the same time


@dataclass(frozen=True, slots=True)
class Round:
    """Configurations to measure for one window each, in this order."""

    stage: str
    contenders: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The measurements of a round."""

    measures: Mapping[Configuration, Measure]
    left_s: float
    failed: Mapping[Configuration, str] = field(default_factory=dict)
    start_s: float | None = None  # measured time to start a server


class Final(StoredModel):
    configuration: Configuration
    rate: float
    p99_ms: float
    over_shipped: float  # median of the rounds' ratios of throughput, or of 1/p99 if no finalist met the bound
    noise: float  # a lead must be larger than this to count
    lead_of_best: float
    is_equal: bool  # differs from the best by no more than the noise
    is_within: bool  # within the bound on p99


@dataclass(frozen=True, slots=True)
class Decision:
    winner: Configuration
    best: Configuration  # the fastest; the winner equals it within the noise and is closer to the shipped one
    is_met: bool  # True if a finalist meets the bound on p99
    finals: tuple[Final, ...]


class TuneSearch:
    def __init__(
        self, space: Space, bound_ms: float | None, pace: Pace, accuracies: Mapping[Variant, float] | None = None
    ) -> None:
        """Start a search. A shipped variant that is not in the space is measured, but cannot win."""
        self._space = space
        self._pace = pace
        self._left_s = pace.budget_s
        self.trials = Trials(space.shipped, bound_ms)
        self._accuracies = accuracies or {}
        if space.shipped.variant not in space.variants:
            self.trials.refused[space.shipped] = "its accuracy is below the minimum"
        self.untried: dict[Configuration, str] = {}

    def rounds(self) -> Generator[Round, RoundResult, Decision]:
        shipped = self._space.shipped
        yield from self._run_stage(VARIANTS, [self._space.start(each) for each in self._space.variants])
        front = self._list_best()
        for axis in self._space.axes(shipped):
            options = [option for each in front for option in self._space.axes(each)[axis]]
            if options:
                yield from self._run_stage(axis, [*front, *options])
                front = self._list_best()
            if axis != "instances and threads":
                front = front[:1]  # the second best can still reach the finals
        yield from self._run_finals()
        return self._decide()

    def _run_stage(self, name: str, contenders: Sequence[Configuration]) -> Generator[Round, RoundResult, None]:
        shipped = self._space.shipped
        wanted = [each for each in dict.fromkeys(contenders) if each != shipped and each not in self.trials.refused]
        wanted = self._choose_affordable(name, wanted)
        size = self._pace.max_servers - 1
        for start in range(0, len(wanted), size):
            group = [shipped, *wanted[start : start + size]]
            for number in range(STAGE_ROUNDS.get(name, 2)):
                group = [each for each in group if self._is_worth_measuring(each, group, number)]
                if len(group) < 2 and number:
                    break
                yield from self._run_round(name, group, number)

    def _choose_affordable(self, name: str, wanted: list[Configuration]) -> list[Configuration]:
        """Return the wanted configurations that are measured already, and as many others as there is time for."""
        known = [each for each in wanted if self.trials.measures(each)]
        new = [each for each in wanted if each not in known]
        finals_s = (MAX_FINALISTS + 1) * MIN_FINAL_ROUNDS * self._pace.window_s
        free_s = (self._left_s - finals_s) * MAX_STAGE_SHARE
        rounds = STAGE_ROUNDS.get(name, 2)
        free_s -= (1 + len(known)) * rounds * self._pace.window_s
        count = max(0, int(free_s / (self._pace.start_s + rounds * self._pace.window_s)))
        if not self.trials.rounds:
            count = max(1, count)  # always try at least one
        for each in new[count:]:
            self.untried[each] = "no time left"
        return [*known, *new[:count]] if new[:count] else []

    def _is_worth_measuring(self, candidate: Configuration, group: Sequence[Configuration], number: int) -> bool:
        """Return True if a configuration is good enough to be measured for another window."""
        trials = self.trials
        if candidate == self._space.shipped or not number:
            return True
        if candidate in trials.refused or not trials.measures(candidate):
            return False
        best = max(trials.gain(other) for other in group if trials.measures(other))
        may_matter = trials.bound_ms is not None and trials.is_within(candidate)
        return may_matter or trials.gain(candidate) > best - HOPELESS_GAPS[min(number, len(HOPELESS_GAPS)) - 1]

    def _run_round(
        self, stage: str, group: Sequence[Configuration], number: int
    ) -> Generator[Round, RoundResult, None]:
        # Every other round runs in reverse order, so that no configuration always runs after the same one.
        order = tuple(group) if number % 2 == 0 else tuple(reversed(group))
        result = yield Round(stage, order)
        self._left_s = result.left_s
        if result.start_s is not None:
            self._pace = replace(self._pace, start_s=result.start_s)
        self.trials.refused.update(result.failed)
        self.trials.add(stage, {each: found for each, found in result.measures.items() if found.rate > 0})

    def _list_best(self) -> list[Configuration]:
        """Return the best configuration, and the best configuration of another variant if almost as good."""
        ranked = self.trials.rank(self.trials.measured())
        if not ranked:
            return [self._space.shipped]
        best = ranked[0]
        rivals = [each for each in ranked if each.variant != best.variant]
        near = [each for each in rivals if self.trials.gain(each) > self.trials.gain(best) - RIVAL_GAP]
        return [best, *near[:1]]

    def _choose_finalists(self) -> list[Configuration]:
        """Return the finalists: the best configuration, an equally good one with fewer changes, and the next best."""
        trials = self.trials
        ranked = [each for each in trials.rank(trials.measured()) if each != self._space.shipped]
        if not ranked:
            return []
        best = ranked[0]
        least = trials.gain(best) - RIVAL_GAP
        near = [each for each in ranked if each.variant == best.variant or trials.gain(each) > least]
        simpler = sorted(
            (each for each in near if self._change_cost(each) < self._change_cost(best)), key=self._change_cost
        )
        quickest = min(ranked, key=trials.p99_ms)
        first = [best, quickest] if trials.bound_ms is not None else [best]
        hopeful = [each for each in ranked if trials.gain(each) > trials.gain(best) - HOPELESS_GAPS[0]]
        return list(dict.fromkeys([*first, *simpler[:1], *hopeful]))[:MAX_FINALISTS]

    def _change_cost(self, candidate: Configuration) -> tuple[int, float]:
        """Return the key that sorts equally good configurations: fewer changes first, then higher accuracy."""
        return candidate.differences(self._space.shipped), -self._accuracies.get(candidate.variant, 0.0)

    def _run_finals(self) -> Generator[Round, RoundResult, None]:
        finalists = self._choose_finalists()
        if not finalists:
            return
        group = [self._space.shipped, *finalists]
        fitting = int(self._left_s / (len(group) * self._pace.window_s))
        count = max(MIN_FINAL_ROUNDS, min(MAX_FINAL_ROUNDS, fitting))
        for number in range(count):
            if number >= MIN_FINAL_ROUNDS and self._left_s < len(group) * self._pace.window_s:
                break
            group = [each for each in group if each == self._space.shipped or each not in self.trials.refused]
            yield from self._run_round(FINALS, group, number)

    def _decide(self) -> Decision:
        trials, shipped = self.trials, self._space.shipped
        met = trials.measured(FINALS)
        if not met:
            return Decision(shipped, shipped, trials.bound_ms is None, ())
        within = [each for each in met if trials.is_within(each, FINALS)]
        is_met = bool(within)
        choices = within or met
        best = trials.rank(choices, FINALS)[0]
        finals = tuple(self._build_final(each, best, by_p99=not is_met) for each in trials.rank(met, FINALS))
        equals = [each.configuration for each in finals if each.is_equal and each.configuration in choices]
        return Decision(min(equals, key=self._change_cost), best, is_met, finals)

    def _build_final(self, candidate: Configuration, best: Configuration, by_p99: bool) -> Final:
        trials = self.trials
        measures = trials.measures(candidate, FINALS)
        lead = trials.compare(best, candidate, FINALS, by_p99)
        return Final(
            configuration=candidate,
            rate=round(sum(measure.rate for measure in measures) / len(measures), 2),
            p99_ms=round(trials.p99_ms(candidate, FINALS), 2),
            over_shipped=round(trials.compare(candidate, self._space.shipped, FINALS, by_p99).ratio, 4),
            noise=round(lead.noise, 4),
            lead_of_best=round(lead.ratio, 4),
            is_equal=candidate == best or not lead.is_better,
            is_within=trials.is_within(candidate, FINALS),
        )
