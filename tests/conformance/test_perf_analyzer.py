"""Triton's unmodified perf_analyzer, which `scripts/clients` fetches."""

import base64
import csv
import io
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.server import ServerProcess
from penstock.core.tensors import pack_bytes
from tests.servers import ROOT

CLIENTS = ROOT / ".venv/clients"
TEXTS = ["a photograph of a fig", "zażółć gęślą jaźń", "water falls through the penstock onto the turbine"]
REQUESTS = ("--request-count", "60")
FLOATS = ("-m", "identity_fp32", "--shape", "x:16")


@dataclass(frozen=True, slots=True)
class Analyzer:
    server: ServerProcess
    folder: Path

    def run(self, protocol: str, *flags: str) -> list[dict[str, float]]:
        """Run perf_analyzer and return its report, a row per level of load."""
        report = self.folder / "report.csv"
        port = self.server.grpc_port if protocol == "grpc" else self.server.http_port
        command: list[str | Path] = [CLIENTS / "bin/perf_analyzer", "-i", protocol, "-u", f"127.0.0.1:{port}", *flags]
        command += ["-f", report, "--verbose-csv"]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(CLIENTS / "lib")}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, said
        assert not re.search("error|failed|warning", said, re.IGNORECASE), said
        successes = [int(count) for count in re.findall(r"Successful request count: (\d+)", said)]
        with report.open(newline="") as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
        assert len(successes) == len(rows), said
        assert all(successes)
        for row in rows:
            assert row["Inferences/Second"] > 0
            assert row["Server Compute Infer"] > 0
            assert {"Server Queue", "Server Compute Input", "Server Compute Output"} <= row.keys()
        return sorted(rows, key=lambda row: row.get("Concurrency", 0.0))


@pytest.fixture
def analyzer(server: ServerProcess, tmp_path: Path) -> Analyzer:
    assert (CLIENTS / "bin/perf_analyzer").exists(), "run scripts/clients first"
    return Analyzer(server, tmp_path)


@pytest.mark.parametrize(("protocol", "data"), [("grpc", "zero"), ("http", "random")])
def test_levels_of_concurrency_are_measured(analyzer, protocol, data):
    windows = (
        "--measurement-mode",
        "count_windows",
        "--measurement-request-count",
        "20",
        "--stability-percentage",
        "999",
    )
    rows = analyzer.run(protocol, *FLOATS, "--input-data", data, "--concurrency-range", "1:3:2", *windows)
    assert [row["Concurrency"] for row in rows] == [1, 3]


@pytest.mark.parametrize(
    ("protocol", "flags"),
    [
        ("grpc", ("--async",)),
        ("grpc", ("--async", "--streaming")),
        ("grpc", ("--async", "--grpc-compression-algorithm", "gzip")),
        ("http", ("--async",)),
        ("http", ("--input-tensor-format", "json", "--output-tensor-format", "json")),
    ],
    ids=["async", "stream", "gzip", "async-http", "json"],
)
def test_every_way_of_sending_is_measured(analyzer, protocol, flags):
    (row,) = analyzer.run(protocol, *FLOATS, *flags, *REQUESTS, "--concurrency-range", "4")
    assert row["Concurrency"] == 4


def test_batches_are_measured(analyzer):
    (row,) = analyzer.run("grpc", "-m", "add_sub", "-x", "1", "-b", "8", *REQUESTS)
    assert row["Concurrency"] == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_texts_of_a_file_are_measured(analyzer, minilm, protocol, tmp_path):
    file = tmp_path / "texts.json"
    file.write_text(json.dumps({"data": [{"text": [text]} for text in TEXTS]}))
    analyzer.run(protocol, "-m", minilm, "--input-data", str(file), "--concurrency-range", "2", "-b", "2", *REQUESTS)


def test_one_text_is_measured(analyzer, minilm):
    analyzer.run("grpc", "-m", minilm, "--string-data", "hello there", "--concurrency-range", "4", *REQUESTS)


def test_images_are_measured(analyzer, tmp_path):
    image = io.BytesIO()
    Image.new("RGB", (96, 64), "teal").save(image, "PNG")
    file = tmp_path / "images.json"
    # Its base64 is that of the encoded bytes, each element behind its length.
    encoded = base64.b64encode(pack_bytes([image.getvalue()])).decode()
    file.write_text(json.dumps({"data": [{"image": {"b64": encoded}}]}))
    analyzer.run("grpc", "-m", "srcnn", "--input-data", str(file), "--concurrency-range", "2", *REQUESTS)


def test_streamed_text_is_measured(analyzer, smollm2, tmp_path):
    sampling = json.dumps({"max_tokens": "4", "temperature": "0"})
    given = {"text_input": ["Water boils at"], "stream": [True], "sampling_parameters": [sampling]}
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"data": [given]}))
    flags = ("--async", "--streaming", "--input-data", str(file), "--shape", "text_input:1", "--request-count", "4")
    (row,) = analyzer.run("grpc", "-m", smollm2, *flags)
    assert row["Response Throughput"] > 2 * row["Inferences/Second"]  # several answers to each request
