"""The figure of tuning, computed from known rounds."""

import pytest

from benchmarks.suite.tune_figure import _list_facts, _make_figure, find_most_common
from penstock.experiments.tuning.search import FINALS
from penstock.experiments.tuning.space import Configuration, Variant
from penstock.experiments.tuning.trials import Measure, Trials

SHIPPED = Configuration("openvino", "bf16", "cpu", 2, 1, 256, 32, 0.0)
INT8, ORT8 = (SHIPPED.with_variant(Variant(engine, "int8")) for engine in ("openvino", "onnx"))


def rounds(*rates: dict[Configuration, float]) -> Trials:
    trials = Trials(SHIPPED)
    for each in rates:
        trials.add(FINALS, {candidate: Measure(rate, 10.0) for candidate, rate in each.items()})
    return trials


def test_the_figure_compares_the_most_common_winner_with_the_shipped_one_in_the_same_rounds() -> None:
    trials = rounds(*({SHIPPED: 100 * slow, INT8: 150 * slow, ORT8: 140 * slow} for slow in (1.0, 0.5, 1.2, 0.9)))
    winners = [ORT8, INT8, INT8]
    assert find_most_common(winners) == INT8
    figure = _make_figure(trials, winners)
    assert (figure.key, figure.bar, figure.rounds) == ("tune_over_shipped", 1.0, 4)
    assert figure.value == pytest.approx(1.5)
    facts = _list_facts(trials, winners)
    assert facts["tune_winner_1"] == str(ORT8)
    assert facts["tune_same_winners"] == 2
    assert facts["tune_winners_apart"] == 1
    assert facts[f"tune_winner_over_{ORT8}"] == pytest.approx(150 / 140)


def test_winners_within_noise_are_equal() -> None:
    trials = rounds(*({SHIPPED: 100.0, INT8: 150.0 + shift, ORT8: 150.0 - shift} for shift in (4, -3, 2, -5, 1)))
    facts = _list_facts(trials, [INT8, ORT8, INT8])
    assert facts["tune_winners_apart"] == 0


def test_the_shipped_configuration_equals_itself() -> None:
    figure = _make_figure(Trials(SHIPPED), [SHIPPED, SHIPPED, SHIPPED])
    assert figure.value == 1.0
    assert figure.is_met
    assert _list_facts(Trials(SHIPPED), [SHIPPED] * 3)["tune_same_winners"] == 3
