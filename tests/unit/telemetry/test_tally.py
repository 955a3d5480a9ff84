"""Tallies add up to the library's own counts."""

import random

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.telemetry.metrics import SECONDS
from penstock.telemetry.tally import Tallies


def samples(registry: CollectorRegistry, name: str) -> list[tuple[str, float]]:
    found = [sample for metric in registry.collect() for sample in metric.samples]
    return [(str(s.labels), s.value) for s in found if s.name.removeprefix(name) in ("_bucket", "_count")]


def test_histograms_agree_with_the_library_also_on_the_bounds() -> None:
    registry, tallies = CollectorRegistry(), Tallies()
    direct = Histogram("direct", "", buckets=SECONDS, registry=registry)
    tallied = Histogram("tallied", "", buckets=SECONDS, registry=registry)
    tally = tallies.add_histogram(tallied)
    rng = random.Random(3)
    values = [*SECONDS, 0.0, 1e9, *(rng.expovariate(10) for _ in range(1000))]
    for number, value in enumerate(values):
        direct.observe(value)
        tally.observe(value)
        if number % 100 == 0:
            tallies.flush()
    tallies.flush()
    tallies.flush()
    assert samples(registry, "tallied") == samples(registry, "direct")
    total, expected = (registry.get_sample_value(name) for name in ("tallied_sum", "direct_sum"))
    assert total is not None
    assert expected is not None
    assert abs(total - expected) < 1e-3


def test_counters_add_up() -> None:
    registry, tallies = CollectorRegistry(), Tallies()
    tally = tallies.add_counter(Counter("things", "", registry=registry))
    tally.inc()
    tally.inc(2.5)
    assert registry.get_sample_value("things_total") == 0
    tallies.flush()
    tallies.flush()
    assert registry.get_sample_value("things_total") == 3.5
