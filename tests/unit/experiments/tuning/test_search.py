"""The search on simulated machines: noisy, drifting, with slow minutes."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import exp

import pytest

from penstock.experiments.tuning.search import FINALS, VARIANTS, Decision, Pace, Round, RoundResult, TuneSearch
from penstock.experiments.tuning.space import (
    Configuration,
    Space,
    Variant,
    list_batch_budgets,
    list_delays,
    list_layouts,
    list_row_limits,
    plan_other_device,
)
from penstock.experiments.tuning.trials import MIN_LEAD, Measure, Trials

BF16, FP32, INT8 = Variant("openvino", "bf16"), Variant("openvino", "fp32"), Variant("openvino", "int8")
ORT32, ORT8 = Variant("onnx", "fp32"), Variant("onnx", "int8")
SPEEDS = {BF16: 200.0, FP32: 110.0, INT8: 300.0, ORT32: 90.0, ORT8: 270.0}
ACCURACIES = {BF16: 0.99997, FP32: 1.0, INT8: 0.991, ORT32: 1.0, ORT8: 0.985}
SHIPPED = Configuration("openvino", "bf16", "cpu", 2, 1, 256, 32, 0.0)
OTHER = replace(SHIPPED, max_tokens=512)
SPACE = Space(
    SHIPPED,
    tuple(SPEEDS),
    list_layouts(2),
    list_batch_budgets(256, True, 32),
    list_row_limits(32, True, 32),
    list_delays(0.0),
)
PACE = Pace(budget_s=360, window_s=2.5, start_s=4.0)
Speed = Callable[[Configuration], float]


def speed(candidate: Configuration) -> float:
    """Two cores: one-thread instances in parallel are best, and a budget of 512 a little better than 256."""
    found = SPEEDS[candidate.variant]
    found *= {(2, 1): 1.0, (1, 2): 0.8, (1, 1): 0.6}[candidate.instances, candidate.threads]
    found *= {64: 0.7, 128: 0.88, 256: 1.0, 512: 1.06, 1024: 0.98, 2048: 0.9}[candidate.max_tokens or 2048]
    return found * (1 - candidate.max_delay_ms / 40)


@dataclass
class Machine:
    """A simulated machine whose windows take time, vary and drift, and sometimes lose half the cores."""

    seed: int
    speed: Speed = speed
    noise: float = 0.06
    callers: int = 32
    rounds: list[Round] = field(default_factory=list)
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.drift = 0.0
        self.running: set[Configuration] = set()

    def measure_window(self, candidate: Configuration) -> Measure:
        self.drift = 0.9 * self.drift + self.rng.gauss(0, 0.04 if self.noise else 0.0)
        disturbed = 0.75 if self.noise and self.rng.random() < 0.04 else 1.0
        rate = self.speed(candidate) * exp(self.drift + self.rng.gauss(0, self.noise)) * disturbed
        self.spent_s += PACE.window_s
        return Measure(rate, self.callers / rate * 1500 * exp(self.rng.gauss(0, 0.1)))

    def answer(self, asked: Round, pace: Pace) -> RoundResult:
        self.rounds.append(asked)
        measures = {}
        for each in asked.contenders:
            if each not in self.running:
                self.running.add(each)
                self.spent_s += pace.start_s
            measures[each] = self.measure_window(each)
        return RoundResult(measures, pace.budget_s - self.spent_s)


def tune(
    machine: Machine, bound_ms: float | None = None, pace: Pace = PACE, space: Space = SPACE
) -> tuple[Decision, TuneSearch]:
    search = TuneSearch(space, bound_ms, pace, ACCURACIES)
    steps = search.rounds()
    asked = next(steps)
    while True:
        try:
            asked = steps.send(machine.answer(asked, pace))
        except StopIteration as stopped:
            return stopped.value, search


def test_the_search_nearly_always_finds_the_fastest_or_its_equal() -> None:
    best = max(SPEEDS.values()) * 1.06
    shares = [speed(tune(Machine(seed))[0].winner) / best for seed in range(60)]
    assert sum(share > 0.9 for share in shares) >= 58, sorted(shares)[:5]
    assert min(shares) > 0.8


def test_repeated_runs_give_the_same_answer_or_an_equal_one() -> None:
    winners = Counter(tune(Machine(seed))[0].winner for seed in range(60))
    (first, most), *_ = winners.most_common()
    assert first == SHIPPED.with_variant(INT8)
    assert most >= 40, winners


def test_small_gains_are_found_on_a_quiet_machine() -> None:
    winner = tune(Machine(0, noise=0.0))[0].winner
    assert speed(winner) == max(SPEEDS.values()) * 1.06


def test_the_shipped_configuration_stays_if_nothing_is_better() -> None:
    def flat(candidate: Configuration) -> float:
        return 200.0 if candidate == SHIPPED else 195.0

    kept = sum(tune(Machine(seed, speed=flat))[0].winner == SHIPPED for seed in range(60))
    assert kept >= 57


def test_a_shipped_configuration_below_the_accuracy_is_replaced_by_a_slower_one() -> None:
    for seed in range(20):
        machine = Machine(seed)
        decision, search = tune(machine, space=replace(SPACE, variants=(FP32, ORT32)))
        assert decision.winner.variant == FP32
        assert speed(decision.winner) < speed(SHIPPED)
        assert all(SHIPPED in asked.contenders for asked in machine.rounds)
        assert "accuracy" in search.trials.refused[SHIPPED]


def test_among_equals_fewer_changes_are_preferred_and_then_more_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(candidate: Configuration) -> float:
        return 300.0 if candidate.variant.is_converted else 100.0

    def winners(variants: tuple[Variant, ...]) -> Counter[Variant]:
        space = Space(SHIPPED.with_variant(ORT32), (ORT32, *variants), (), (), (), ())
        return Counter(tune(Machine(seed, speed=flat), space=space)[0].winner.variant for seed in range(40))

    assert winners((INT8, ORT8))[ORT8] >= 37
    half = Variant("onnx", "fp16")
    monkeypatch.setitem(ACCURACIES, half, 0.9999)
    assert winners((ORT8, half))[half] >= 37
    monkeypatch.setitem(ACCURACIES, half, 0.5)
    assert winners((ORT8, half))[ORT8] >= 37


def test_the_bound_on_p99_takes_precedence_over_throughput() -> None:
    def slow_tail(candidate: Configuration) -> float:
        return speed(candidate) * (1.5 if candidate.max_tokens == 512 else 1.0)

    class Tailed(Machine):
        def measure_window(self, candidate: Configuration) -> Measure:
            found = super().measure_window(candidate)
            return replace(found, p99_ms=900.0 if candidate.max_tokens == 512 else found.p99_ms)

    for seed in range(20):
        decision, _ = tune(Tailed(seed, speed=slow_tail), 300)
        assert decision.is_met
        assert decision.winner.max_tokens != 512
        assert decision.winner.variant in (INT8, ORT8)


def test_the_shipped_configuration_is_replaced_by_its_equal_if_only_it_exceeds_the_bound() -> None:
    class Late(Machine):
        def measure_window(self, candidate: Configuration) -> Measure:
            return replace(super().measure_window(candidate), p99_ms=900.0 if candidate == SHIPPED else 100.0)

    for seed in range(20):
        decision, _ = tune(Late(seed, speed=lambda candidate: 200.0), 300)
        assert decision.is_met
        assert decision.winner != SHIPPED


def test_if_nothing_meets_the_bound_the_nearest_is_chosen_and_marked() -> None:
    decisions = [tune(Machine(seed), 20)[0] for seed in range(40)]
    assert not any(decision.is_met for decision in decisions)
    assert sum(decision.winner.variant in (INT8, ORT8) for decision in decisions) >= 36


@pytest.mark.parametrize("minutes", [1, 2, 6, 20])
def test_the_search_keeps_its_time_limit_and_reports_what_was_not_measured(minutes: int) -> None:
    pace = replace(PACE, budget_s=minutes * 60)
    machine = Machine(5)
    decision, search = tune(machine, pace=pace)
    assert machine.spent_s <= max(pace.budget_s * 1.1, 70)
    assert bool(search.untried) == (minutes < 6)
    assert decision.finals
    if minutes > 1:
        assert decision.winner.variant in (INT8, ORT8)


def test_contenders_alternate_with_the_shipped_one_within_the_server_limit() -> None:
    machine = Machine(2)
    tune(machine, pace=replace(PACE, max_servers=4))
    assert all(SHIPPED in asked.contenders for asked in machine.rounds)
    assert all(len(asked.contenders) <= 4 for asked in machine.rounds)
    stages = [asked.stage for asked in machine.rounds]
    assert stages[0] == VARIANTS
    assert stages.count(FINALS) >= 4
    finals = [asked.contenders for asked in machine.rounds if asked.stage == FINALS]
    assert finals[1] == finals[0][::-1]


def test_a_failing_candidate_is_left_out() -> None:
    class Broken(Machine):
        def answer(self, asked: Round, pace: Pace) -> RoundResult:
            told = super().answer(asked, pace)
            failed = {each: "does not load" for each in asked.contenders if each.variant == INT8}
            kept = {each: found for each, found in told.measures.items() if each not in failed}
            return replace(told, measures=kept, failed=failed)

    decision, search = tune(Broken(0))
    assert decision.winner.variant == ORT8
    assert search.trials.refused[SHIPPED.with_variant(INT8)] == "does not load"


def test_with_a_single_variant_the_rest_is_tuned() -> None:
    poor = replace(SHIPPED, instances=1, threads=2)
    space = replace(SPACE, shipped=poor, variants=(BF16,))
    decision, _ = tune(Machine(0, noise=0.02), space=space)
    assert (decision.winner.instances, decision.winner.threads) == (2, 1)


def test_without_alternatives_the_shipped_configuration_stays() -> None:
    decision, search = tune_nothing()
    assert decision.winner == SHIPPED
    assert decision.finals == ()
    assert not search.trials.rounds


def tune_nothing() -> tuple[Decision, TuneSearch]:
    search = TuneSearch(Space(SHIPPED, (BF16,), ((2, 1),), (), (), ()), None, PACE)
    with pytest.raises(StopIteration) as stopped:
        next(search.rounds())
    return stopped.value.value, search


def finals(*rates: float) -> Trials:
    """Return finals in which the shipped configuration reached 100 and the other candidate these rates."""
    found = Trials(SHIPPED)
    for rate in rates:
        found.add(FINALS, {SHIPPED: Measure(100, 10), OTHER: Measure(rate, 10)})
    return found


def test_a_lead_counts_beyond_three_standard_errors_and_the_minimum() -> None:
    noisy = finals(90, 130, 85, 125).compare(OTHER, SHIPPED, FINALS)
    assert not noisy.is_better
    longer = finals(*[90, 130, 85, 125] * 9).compare(OTHER, SHIPPED, FINALS)
    assert longer.noise == pytest.approx(noisy.noise / 3, rel=0.3)
    small = finals(102, 102, 102, 102).compare(OTHER, SHIPPED, FINALS)
    assert small.noise == MIN_LEAD
    assert not small.is_better
    assert finals(104, 104, 104, 104).compare(OTHER, SHIPPED, FINALS).is_better


def test_an_outlier_window_changes_no_verdict() -> None:
    assert finals(118, 122, 120, 121, 119, 20).compare(OTHER, SHIPPED, FINALS).is_better
    assert not finals(99, 101, 100, 101, 99, 500).compare(OTHER, SHIPPED, FINALS).is_better


def test_changes_contain_the_differing_keys_and_their_companions() -> None:
    assert SHIPPED.changes(SHIPPED) == {}
    assert Configuration("openvino", "fp32", "cpu", 1, 1, None, 32, 1.0).changes(SHIPPED) == {
        "engine": "openvino",
        "precision": "fp32",
        "instances.count": 1,
        "instances.threads": 1,
        "batching.max_tokens": None,
        "batching.max_delay_ms": 1.0,
    }
    assert SHIPPED.with_variant(ORT8).changes(SHIPPED) == {"engine": "onnx"}
    on_gpu = SHIPPED.with_variant(Variant("onnx", "fp32", "cuda"))
    assert on_gpu.changes(SHIPPED)["instances.device"] == "cuda"


def test_layouts_use_the_cores_in_every_combination() -> None:
    assert list_layouts(1) == ((1, 1),)
    assert list_layouts(2) == ((2, 1), (1, 2), (1, 1))
    assert set(list_layouts(8)) == {(8, 1), (1, 8), (4, 1), (2, 4), (4, 2)}
    assert all(count * threads <= 6 for count, threads in list_layouts(6))


def test_the_limit_on_request_size_is_never_lowered() -> None:
    assert list_row_limits(8, may_lower=False, concurrency=32) == (16,)
    assert list_row_limits(8, may_lower=True, concurrency=8) == (4,)
    assert list_row_limits(32, may_lower=False, concurrency=32) == ()


# --- on a GPU

CUDA = Variant("onnx", "fp16", "cuda")


def test_the_search_on_a_gpu_starts_with_large_batches() -> None:
    space = replace(
        SPACE, variants=(BF16, CUDA), elsewhere=plan_other_device(SHIPPED, 16, has_lengths=True, in_flight=4096)
    )
    assert space.start(BF16) == SHIPPED
    there = space.start(CUDA)
    assert there == Configuration("onnx", "fp16", "cuda", 2, 1, 65_536, 1024, 0.0)
    axes = space.axes(there)
    assert [(each.instances, each.threads) for each in axes["instances and threads"]] == [(4, 1), (1, 1), (8, 1)]
    assert [each.max_tokens for each in axes["batch budget"]] == [131_072, 32_768, 262_144]
    assert [each.max_rows for each in axes["rows in a batch"]] == [256, 2048]
    assert all(each.instances <= 2 for each in space.axes(SHIPPED)["instances and threads"])
    changes = there.changes(SHIPPED)
    assert changes["instances.device"] == "cuda"
    assert changes["batching.max_rows"] == 1024


def test_kept_settings_also_apply_on_another_device() -> None:
    there = plan_other_device(SHIPPED, 16, has_lengths=True, in_flight=64)
    assert there.max_rows == (256,)  # this many are never in flight
    kept = there.keeping("max_tokens", "max_rows", max_tokens=(), max_rows=())
    space = replace(SPACE, variants=(BF16, CUDA), elsewhere=kept)
    assert (space.start(CUDA).max_tokens, space.start(CUDA).max_rows) == (SHIPPED.max_tokens, SHIPPED.max_rows)
    assert space.axes(space.start(CUDA))["batch budget"] == []


def test_from_gpu_to_processor_the_cores_are_divided_again() -> None:
    shipped = replace(SHIPPED, device="cuda:1", max_tokens=65_536, max_rows=1024, instances=2)
    there = plan_other_device(shipped, 4, has_lengths=True, in_flight=32)
    texts = {"max_tokens": 256, "max_rows": 32}
    assert there.start == {"instances": 4, "threads": 1, **texts}
    of_images = plan_other_device(SHIPPED, 4, has_lengths=False, in_flight=32)
    assert (of_images.start, of_images.max_rows) == ({"instances": 2, "threads": 1, "max_tokens": 16}, ())


def test_the_gpu_wins_if_it_is_faster() -> None:
    def faster(candidate: Configuration) -> float:
        return 900.0 if candidate.device == "cuda" else speed(candidate)

    space = replace(
        SPACE, variants=(*SPEEDS, CUDA), elsewhere=plan_other_device(SHIPPED, 2, has_lengths=True, in_flight=32)
    )
    machine = Machine(0, speed=faster)
    winner = tune(machine, space=space)[0].winner
    assert winner.variant == CUDA
    assert winner.max_rows == 1024
    finalists = set(machine.rounds[-1].contenders) - {SHIPPED}
    assert {each.variant for each in finalists} == {CUDA}, "a configuration that is far behind is no finalist"
