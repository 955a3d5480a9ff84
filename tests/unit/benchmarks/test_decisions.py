"""The cost of a decision is measured for every policy."""

from benchmarks.suite.decisions import POLICIES, measure_decisions
from benchmarks.suite.figures import make_decision_figure


def test_every_policy_is_measured_in_every_round() -> None:
    costs = measure_decisions(rounds=2)
    assert set(costs) == set(POLICIES)
    assert len(costs) == 8
    assert {len(found) for found in costs.values()} == {2}
    assert all(few > 0 and many > 0 for found in costs.values() for few, many in found)


def test_the_figure_is_the_cost_of_the_slowest_policy() -> None:
    assert make_decision_figure({"random": [(2.0, 2.2)], "hash": [(4.0, 8.0)]}).value == 2.0
