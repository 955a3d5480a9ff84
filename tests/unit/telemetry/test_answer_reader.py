"""Counts of a gateway's answers since it started."""

from prometheus_client import CollectorRegistry

from penstock.telemetry.answer_reader import AnswerReader
from penstock.telemetry.metrics import SECONDS, ServingMetrics


def test_all_counts_since_the_start_are_read_and_then_changed_ones() -> None:
    metrics = ServingMetrics(CollectorRegistry())
    metrics.requests.labels("m", "1", "rest", "ok").inc(3)  # of an earlier process
    metrics.request_seconds.labels("m", "1").observe(0.2)
    reader = AnswerReader(metrics)
    metrics.requests.labels("m", "1", "rest", "ok").inc(2)
    metrics.requests.labels("m", "1", "grpc", "ok").inc()
    metrics.requests.labels("m", "1", "grpc", "queue_full").inc()
    metrics.requests.labels("", "", "grpc", "unknown_model").inc()
    metrics.request_seconds.labels("m", "1").observe(0.3)
    metrics.requests.labels("n", "2", "rest", "ok").inc()
    first, second = reader.read(is_all=True)
    assert (first.model, first.version, first.codes) == ("m", "1", {"ok": 3, "queue_full": 1})
    assert len(first.buckets) == len(SECONDS) + 1
    assert (first.buckets[0], first.buckets[-1]) == (0, 1)
    assert round(first.seconds, 6) == 0.3
    assert (second.model, second.codes) == ("n", {"ok": 1})
    assert reader.read(is_all=False) == []
    metrics.requests.labels("n", "2", "rest", "ok").inc()
    (changed,) = reader.read(is_all=False)
    assert changed.codes == {"ok": 2}
    assert len(reader.read(is_all=True)) == 2
