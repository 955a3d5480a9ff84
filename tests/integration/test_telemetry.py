"""Metrics, logs and spans of a real server."""

import contextlib
import gzip
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, floats_json, log_lines, write_identity, write_slow

WAIT_S = 60.0
LASTING, LONG = 2500.0, 8000.0  # rounds of the slow model: at least a second
PHASES = ("admit", "queue", "batch", "compute", "reply", "request")
ONE_BY_ONE = "batching: {max_rows: 1, max_queue: 1}\ninstances: {count: 1}\n"
TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_ID}-01"


class Collector(ThreadingHTTPServer):
    """An OTLP/HTTP receiver that keeps every received span with the name of the service that sent it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.spans: list[tuple[str, Any]] = []
        self.calls = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, path: str, body: bytes) -> None:
        self.calls += 1
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def of_request(self, request_id: str) -> dict[str, tuple[str, Any]]:
        """Return the service and span of each span name of a request."""
        return {
            span.name: (service, span) for service, span in self.spans if attributes(span)["request_id"] == request_id
        }

    def has_both(self, request_id: str) -> bool:
        """Return True if the spans of gateway and worker have arrived."""
        return len(self.of_request(request_id)) == 2


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.take(self.path, gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("telemetry") / "models"
    write_identity(repository, "identity", "FP32")
    write_slow(repository, "slow", ONE_BY_ONE)
    return repository


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[ServerProcess]:
    """Start a server with two workers and without spans; the library's own variable does not enable them."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    folder = tmp_path_factory.mktemp("plain")
    with ServerProcess(models, folder, "--workers", "2", environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def traced(models: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[ServerProcess]:
    environment = {"PENSTOCK_TELEMETRY__OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with ServerProcess(models, tmp_path_factory.mktemp("traced"), environment=environment) as running:
        yield running


def infer(server: ServerProcess, model: str, *numbers: float, rows: int = 1, **metadata: str) -> list[float]:
    with grpc.insecure_channel(server.grpc) as channel:
        message = floats(model, *numbers, rows=rows, request_id=metadata.pop("request_id", ""))
        stub = GRPCInferenceServiceStub(channel)
        return answered(stub.ModelInfer(message, timeout=WAIT_S, metadata=tuple(metadata.items())))


# --- metrics


def becomes(server: ServerProcess, value: float, name: str, **labels: str) -> None:
    eventually(lambda: server.metric(name, **labels) == value, f"{name} {labels} is {value}")


def test_every_phase_is_measured(server):
    before = {phase: server.metric(f"penstock_{phase}_seconds_count", model="identity") for phase in PHASES}
    for number in range(5):
        infer(server, "identity", number)
    httpx.post(f"{server.http_url}/v2/models/identity/infer", json=floats_json(1.0)).raise_for_status()
    for phase in PHASES:
        name = f"penstock_{phase}_seconds"
        becomes(server, before[phase] + 6, f"{name}_count", model="identity", version="1")
        assert server.metric(f"{name}_sum", model="identity") > 0
        assert server.metric(f"{name}_bucket", model="identity", le="+Inf") == before[phase] + 6
    assert server.metric("penstock_requests", model="identity", protocol="grpc", code="ok") >= 5
    assert server.metric("penstock_requests", model="identity", protocol="rest", code="ok") >= 1
    assert server.metric("penstock_batches", model="identity") == before["compute"] + 6


def test_failures_are_counted_by_code(server):
    for model, code in (("nobody", "unknown_model"), ("slow", "invalid_tensor")):
        before = server.metric("penstock_requests", protocol="rest", code=code)
        body = {"inputs": [{"name": "x", "datatype": "INT8", "shape": [1, 1], "data": [1]}]}
        assert httpx.post(f"{server.http_url}/v2/models/{model}/infer", json=body).status_code in (400, 404)
        becomes(server, before + 1, "penstock_requests", protocol="rest", code=code)
    assert server.metric("penstock_failures", model="slow", code="invalid_tensor") == 1


def queue(server: ServerProcess) -> dict[str, int]:
    status = server.status()
    (block_id,) = (block["block_id"] for block in status["blocks"] if block["model"] == "slow")
    found: dict[str, int] = status["queues"][block_id]
    return found


def test_refusals_are_counted_and_gauges_show_waiting_requests(server):
    with pytest.raises(grpc.RpcError):
        infer(server, "identity", 1.0, rows=5000)
    becomes(server, 1, "penstock_refusals", reason="request_too_large")
    with grpc.insecure_channel(server.grpc) as channel:
        # Each worker takes two requests, and one request waits in the gateway.
        stub = GRPCInferenceServiceStub(channel)
        running = [stub.ModelInfer.future(floats("slow", LONG), timeout=WAIT_S) for _ in range(5)]
        eventually(lambda: queue(server) == {"waiting": 1, "running": 4}, "one waits in the gateway")
        with pytest.raises(grpc.RpcError, match="max_queue"):
            infer(server, "slow", 1.0)
        becomes(server, 1, "penstock_refusals", reason="queue_full")
        becomes(server, 5, "penstock_inflight_requests")
        becomes(server, 20, "penstock_inflight_bytes")
        becomes(server, 1, "penstock_queue_jobs", state="waiting")
        becomes(server, 4, "penstock_queue_jobs", state="running")
        becomes(server, 2, "penstock_worker_waiting", model="slow")
        becomes(server, 2, "penstock_instances", model="slow", state="busy")
        becomes(server, 2, "penstock_workers")
        assert not any(future.done() for future in running)
        for future in running:
            future.cancel()
    eventually(lambda: server.metric("penstock_instances", model="slow", state="idle") == 2, "both are idle again")
    eventually(lambda: server.metric("penstock_inflight_requests") == 0, "nothing is inside")
    assert server.metric("penstock_gateway_memory_bytes") > 1e7
    assert server.metric("penstock_worker_memory_bytes", worker="worker-1") > 1e7


def signal_a_worker(server: ServerProcess, number: int) -> None:
    os.kill(server.status()["workers"][0]["pid"], number)


def are_both_workers_back(server: ServerProcess) -> bool:
    workers = server.status()["workers"]
    return len(workers) == 2 and all(len(worker["blocks"]) == 2 for worker in workers)


def test_retries_are_counted_by_reason(server):
    eventually(lambda: queue(server) == {"waiting": 0, "running": 0}, "it is idle")
    with ThreadPoolExecutor(4) as pool:
        # Each worker has two requests: one runs and one waits.
        running = [pool.submit(infer, server, "slow", LASTING) for _ in range(4)]
        eventually(lambda: queue(server)["running"] == 4, "both workers have two")
        signal_a_worker(server, signal.SIGTERM)
        eventually(lambda: server.metric("penstock_retries", reason="handed_back") >= 1, "what waited was handed back")
        assert [future.result(WAIT_S) for future in running] == [[LASTING]] * 4
        eventually(lambda: are_both_workers_back(server), "the worker is back")
        running = [pool.submit(infer, server, "slow", LASTING) for _ in range(4)]
        eventually(lambda: queue(server)["running"] == 4, "both workers have two")
        signal_a_worker(server, signal.SIGKILL)
        eventually(lambda: server.metric("penstock_retries", reason="worker_lost") >= 2, "what it had ran again")
        assert [future.result(WAIT_S) for future in running] == [[LASTING]] * 4
    assert server.metric("penstock_workers_lost", reason="left") == 1
    assert server.metric("penstock_workers_lost", reason="died") == 1
    eventually(lambda: are_both_workers_back(server), "the worker is back")


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def test_text_and_json_agree(server):
    def from_text() -> Samples:
        text = httpx.get(f"{server.http_url}/metrics", timeout=WAIT_S).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(s.name, frozenset(s.labels.items())): s.value for s in samples if "memory" not in s.name}

    def from_json(path: str, **headers: str) -> Samples:
        answer = httpx.get(f"{server.http_url}{path}", headers=headers, timeout=WAIT_S)
        assert answer.headers["content-type"].startswith("application/json")
        samples = [sample for metric in answer.json().values() for sample in metric["samples"]]
        return {(s["name"], frozenset(s["labels"].items())): s["value"] for s in samples if "memory" not in s["name"]}

    infer(server, "identity", 1.0)
    eventually(
        lambda: from_text() == from_json("/metrics.json") == from_json("/metrics", accept="application/json"),
        "all forms show the same",
    )
    assert len(from_text()) > 50


# --- logs


def test_a_failed_request_is_logged_with_its_id(server):
    with pytest.raises(grpc.RpcError):
        infer(server, "nobody", 1.0, request_id="lost-42")
    httpx.post(f"{server.http_url}/v2/models/slow/infer", json={"inputs": []}, headers={"x-request-id": "lost-43"})

    def lines(request_id: str) -> list[dict[str, Any]]:
        return [line for line in log_lines(server.log) if line.get("request_id") == request_id]

    eventually(lambda: lines("lost-42") and lines("lost-43"), "both are in the log")
    (line,) = lines("lost-42")
    assert (line["event"], line["model"], line["code"]) == ("request_failed", "nobody", "unknown_model")
    assert {"level", "timestamp", "role", "error"} <= line.keys()
    (line,) = lines("lost-43")
    assert (line["event"], line["model"]) == ("request_failed", "slow")


def test_every_line_is_json(server):
    text = server.log.read_text()
    assert len(log_lines(server.log)) == len(text.splitlines()), text[-3000:]


# --- spans


def test_a_request_is_one_trace_over_gateway_and_worker(traced, collector):
    infer(traced, "identity", 1.0, request_id="spans-1")
    eventually(lambda: collector.has_both("spans-1"), "both spans have come")
    spans = collector.of_request("spans-1")
    (gateway, serve), (worker, run) = spans["serve"], spans["run"]
    assert (gateway, worker) == ("penstock-gateway", "penstock-worker")
    assert run.trace_id == serve.trace_id
    assert run.parent_span_id == serve.span_id
    assert serve.parent_span_id == b""
    assert serve.start_time_unix_nano <= run.start_time_unix_nano <= run.end_time_unix_nano
    assert run.end_time_unix_nano <= serve.end_time_unix_nano
    assert attributes(serve)["model"] == attributes(run)["model"] == "identity"
    assert attributes(serve)["protocol"] == "grpc"
    assert attributes(run)["compute_ns"] > 0


def test_a_callers_trace_is_continued(traced, collector):
    infer(traced, "identity", 1.0, request_id="spans-grpc", traceparent=TRACEPARENT)
    body = {**floats_json(1.0), "id": "spans-rest"}
    httpx.post(f"{traced.http_url}/v2/models/identity/infer", json=body, headers={"traceparent": TRACEPARENT})
    with grpc.insecure_channel(traced.grpc) as channel:
        messages = iter([floats("identity", 1.0, request_id="spans-stream")])
        metadata = (("traceparent", TRACEPARENT),)
        list(GRPCInferenceServiceStub(channel).ModelStreamInfer(messages, timeout=WAIT_S, metadata=metadata))
    for request_id in ("spans-grpc", "spans-rest", "spans-stream"):
        eventually(partial(collector.has_both, request_id), f"the spans of {request_id} have come")
        spans = collector.of_request(request_id)
        assert {span.trace_id.hex() for _, span in spans.values()} == {TRACE_ID}
        assert spans["serve"][1].parent_span_id.hex() == CALLER_ID


def test_a_failure_is_recorded_in_its_span(traced, collector):
    with contextlib.suppress(grpc.RpcError):
        infer(traced, "nobody", 1.0, request_id="spans-failed")
    eventually(lambda: collector.of_request("spans-failed"), "the span has come")
    (_, span) = collector.of_request("spans-failed")["serve"]
    assert span.status.code == 2
    assert "unknown model" in span.status.message
    body = {"id": "spans-wrong", "inputs": [{"name": "z", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    assert httpx.post(f"{traced.http_url}/v2/models/identity/infer", json=body).status_code == 400
    eventually(lambda: collector.has_both("spans-wrong"), "both spans have come")
    assert {span.status.code for _, span in collector.of_request("spans-wrong").values()} == {2}


def test_no_spans_are_sent_by_default(server, traced, collector):
    infer(server, "identity", 1.0, request_id="silent")
    # Spans arrive after a moment: a later request of the other server tells when.
    infer(traced, "identity", 1.0, request_id="spans-later")
    eventually(lambda: collector.has_both("spans-later"), "the other server's spans have come")
    assert collector.of_request("silent") == {}
    assert {attributes(span)["request_id"].partition("-")[0] for _, span in collector.spans} == {"spans"}
