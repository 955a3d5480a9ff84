"""Aggregates of live metrics over the instances of a block, and the conditions on them. Pure: no I/O."""

from collections.abc import Sequence
from math import ceil

from penstock.features.search.conditions import Condition, ConditionGroup, MetricComparison, compare_metric
from penstock.features.search.documents import InstanceMetrics

_PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def compute_aggregate(name: str, target: str, instances: Sequence[InstanceMetrics]) -> float | None:
    """Return the aggregate of the metric, or None if no instance has the metric. `count` is never None."""
    values = [each[target] for each in instances if target in each]
    if name == "count":
        return float(len(values))
    if not values:
        return None
    if name == "avg":
        return sum(values) / len(values)
    if name == "sum":
        return sum(values)
    if name == "min":
        return min(values)
    if name == "max":
        return max(values)
    return sorted(values)[max(0, ceil(_PERCENTILES[name] * len(values)) - 1)]


def find_failed_metric(
    condition: Condition | None, instances: Sequence[InstanceMetrics]
) -> tuple[MetricComparison, float | None] | None:
    """Return the first failing comparison and its aggregate, or None if the condition holds."""
    if condition is None:
        return None
    if isinstance(condition, ConditionGroup):
        failures = [find_failed_metric(part, instances) for part in condition.parts]
        if condition.is_and:
            return next((each for each in failures if each is not None), None)
        return None if None in failures else failures[0]
    assert isinstance(condition, MetricComparison)
    value = compute_aggregate(condition.aggregate, condition.target, instances)
    return None if compare_metric(condition, value) else (condition, value)
