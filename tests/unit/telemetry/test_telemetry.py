"""Metrics of several processes in one folder, and spans over two roles."""

import subprocess
import sys
from pathlib import Path

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.core.config import TelemetrySettings
from penstock.telemetry.metrics import forget_gauges, format_as_json, format_as_text, open_shared_registry
from penstock.telemetry.traces import Traces

PROCESS = """
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from penstock.telemetry.metrics import RouterMetrics, share_metrics
share_metrics(Path(sys.argv[1]), sys.argv[2])
metrics = RouterMetrics(CollectorRegistry())
metrics.late_replies.inc(2)
metrics.workers.set(3)
metrics.queue.labels("blk", "waiting").set(5)
"""


def run(folder: Path, name: str) -> None:
    subprocess.run([sys.executable, "-c", PROCESS, str(folder), name], check=True, timeout=60)


def sample(folder: Path, name: str) -> float | None:
    return open_shared_registry(folder).get_sample_value(name)


def test_counters_of_all_processes_add_up_and_outlive_them(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0")
    run(tmp_path, "gateway-1")
    run(tmp_path, "gateway-1")  # restarted: its counts continue
    assert sample(tmp_path, "penstock_late_replies_total") == 6
    assert len(list(tmp_path.glob("counter_*.db"))) == 2


def test_gauges_of_an_ended_process_are_removed(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0")
    run(tmp_path, "gateway-1")
    labels = {"block": "blk", "state": "waiting"}
    assert open_shared_registry(tmp_path).get_sample_value("penstock_queue_jobs", labels) == 10
    forget_gauges(tmp_path, "gateway-1")
    assert open_shared_registry(tmp_path).get_sample_value("penstock_queue_jobs", labels) == 5


def test_text_and_json_agree(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0")
    assert b"penstock_late_replies_total 2.0" in format_as_text(open_shared_registry(tmp_path))
    found = format_as_json(open_shared_registry(tmp_path))["penstock_late_replies"]
    assert found["samples"][0]["value"] == 2.0


def test_traces_are_off_unless_an_endpoint_is_set() -> None:
    assert not Traces(TelemetrySettings(), "x").is_on


def test_a_span_of_the_worker_is_a_child_of_the_gateways() -> None:
    outer_spans, inner_spans = InMemorySpanExporter(), InMemorySpanExporter()
    gateway, worker = (
        Traces(TelemetrySettings(), "gateway", outer_spans),
        Traces(TelemetrySettings(), "worker", inner_spans),
    )
    outer = gateway.start("serve", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", model="m")
    worker.start("run", outer.traceparent, model="m").end(ValueError("no"))
    outer.end()
    gateway.close()
    worker.close()
    finished = (*outer_spans.get_finished_spans(), *inner_spans.get_finished_spans())
    spans = {span.name: span for span in finished}
    assert spans["serve"].context.trace_id == spans["run"].context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert spans["run"].parent is not None
    assert spans["run"].parent.span_id == spans["serve"].context.span_id
    assert not spans["run"].status.is_ok
