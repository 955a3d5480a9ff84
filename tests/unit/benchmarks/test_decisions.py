"""The cost of a decision is measured for every policy."""

from benchmarks.suite.decisions import POLICIES, decision_costs, decision_rounds, worst_ratio


def test_every_policy_is_measured() -> None:
    costs = decision_costs(rounds=1)
    assert set(costs) == set(POLICIES)
    assert len(costs) == 8
    assert all(few > 0 and many > 0 for few, many in costs.values())


def test_every_round_counts() -> None:
    assert {len(found) for found in decision_rounds(rounds=2).values()} == {2}


def test_the_worst_ratio_is_that_of_the_worst_policy() -> None:
    assert worst_ratio({"random": (2.0, 2.2), "hash": (4.0, 8.0)}) == 2.0
