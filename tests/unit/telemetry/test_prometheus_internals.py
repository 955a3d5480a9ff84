"""The private parts of prometheus_client that telemetry/prometheus_internals.py uses."""

import json
import subprocess
import sys
from math import inf
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram

from penstock.telemetry.prometheus_internals import (
    MappedValues,
    add_observations,
    bucket_bounds,
    mmap_key,
    read_values,
)

KEY = mmap_key("m", "m_total", ["model"], ["minilm"], "Requests")
SHARED = """
import sys
from prometheus_client import CollectorRegistry, Counter, Gauge
from penstock.telemetry.prometheus_internals import use_value_class
class Value:
    def __init__(self, typ, metric_name, name, labelnames, labelvalues, help_text, multiprocess_mode="", **_):
        print(typ, metric_name, name, list(labelnames), list(labelvalues), help_text, multiprocess_mode)
    def inc(self, amount): print("inc", amount)
    def set(self, value, timestamp=None): print("set", value)
use_value_class(Value)
registry = CollectorRegistry()
Counter("c", "Count", ["l"], registry=registry).labels("x").inc(2)
Gauge("g", "Level", registry=registry, multiprocess_mode="livesum").set(3)
"""


def test_a_key_names_metric_series_and_labels() -> None:
    assert json.loads(KEY) == ["m", "m_total", {"model": "minilm"}, "Requests"]


def test_written_values_are_read_back_by_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "counter_p.db"
    mapped = MappedValues(file)
    used = mapped.used_bytes
    assert KEY not in mapped
    mapped.write(KEY, 2.5)
    assert KEY in mapped
    assert mapped.read(KEY) == 2.5
    assert used < mapped.used_bytes <= mapped.capacity_bytes == file.stat().st_size
    assert mapped.fileno() > 2
    assert list(read_values(file)) == [(KEY, 2.5)]
    mapped.close()


def test_many_observations_are_added_at_once() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "Latency", buckets=(1, 2), registry=registry)
    assert list(bucket_bounds(histogram)) == [1, 2, inf]
    add_observations(histogram, [2, 0, 1], 7.5)
    found = {
        sample.name + sample.labels.get("le", ""): sample.value
        for metric in histogram.collect()
        for sample in metric.samples
    }
    wanted = {"h_bucket1.0": 2, "h_bucket2.0": 2, "h_bucket+Inf": 3, "h_count": 3, "h_sum": 7.5}
    assert {name: found[name] for name in wanted} == wanted


def test_metrics_use_the_chosen_value_class() -> None:
    found = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.splitlines() == [
        "counter c c_total ['l'] ['x'] Count ",
        "inc 2",
        "gauge g g [] [] Level livesum",
        "set 3.0",
    ]
