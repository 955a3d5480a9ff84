"""Counts by the names of keys: each under its own, and those beyond the bound together."""

from prometheus_client import CollectorRegistry

from penstock.core.principals import Principal
from penstock.core.requests import InferResponse, Timing
from penstock.features.limits.usage import MAX_NAMES, CallerCounts
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.tally import Tallies


def test_keys_are_counted_by_name_and_labels_are_bounded() -> None:
    registry, tallies = CollectorRegistry(), Tallies()
    metrics = ServingMetrics(registry)
    counts = CallerCounts(metrics.key_requests, metrics.key_tokens, tallies)
    for number in range(MAX_NAMES + 3):
        counts.count_answered(Principal(f"name-{number}", f"key-{number}"))
    counts.count_answered(Principal("name-0", "key-0"))
    counts.count_failed(Principal("name-0", "key-0"), "queue_full")
    counts.count_failed(Principal("late", "key-late"), "queue_full")
    tallies.flush()

    def seen(key: str, code: str) -> float | None:
        return registry.get_sample_value("penstock_key_requests_total", {"key": key, "code": code})

    assert (seen("name-0", "ok"), seen("name-1", "ok"), seen("other", "ok")) == (2.0, 1.0, 3.0)
    assert (seen("name-0", "queue_full"), seen("other", "queue_full")) == (1.0, 1.0)
    assert seen("late", "queue_full") is None


def test_tokens_are_counted_if_answers_report_them() -> None:
    registry, tallies = CollectorRegistry(), Tallies()
    metrics = ServingMetrics(registry)
    counts = CallerCounts(metrics.key_requests, metrics.key_tokens, tallies)
    for tokens in (12, 1, 0):
        counts.count_tokens(Principal("name", "key"), InferResponse("m", "1", "", [], Timing(), {"tokens": tokens}))
    counts.count_tokens(Principal("other", "key-2"), InferResponse("m", "1", "", [], Timing()))
    tallies.flush()
    assert registry.get_sample_value("penstock_key_tokens_total", {"key": "name"}) == 13
    assert registry.get_sample_value("penstock_key_tokens_total", {"key": "other"}) is None
