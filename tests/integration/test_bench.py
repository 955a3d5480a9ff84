"""`penstock bench` against a real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from penstock.experiments.load.latencies import Latencies
from penstock.models.samples.noop import NOOP, write_noop

# Returns the outputs of a model that generates text, without one.
TEXT = """
import numpy as np


class Model:
    def infer(self, inputs, context):
        words = len(inputs["text_input"][0].split())
        for number in range(int(context.parameters["max_tokens"])):
            yield {"text_output": np.array([b" word"], object), "usage": np.array([words, number + 1, -1], np.int32)}
"""
TEXT_SETTINGS = """
engine: python
instances: {count: 2}
python:
  is_decoupled: true
  inputs: [{name: text_input, datatype: BYTES, shape: [1]}]
  outputs: [{name: text_output, datatype: BYTES, shape: [1]}, {name: usage, datatype: INT32, shape: [3]}]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("bench")
    write_noop(folder / "models" / NOOP)
    text = folder / "models" / "text"
    (text / "1").mkdir(parents=True)
    (text / "1" / "model.py").write_text(TEXT)
    (text / "model.yaml").write_text(TEXT_SETTINGS)
    with ServerProcess(folder / "models", folder) as running:
        yield running


def bench(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "bench", "--server", server.http_url]
    command += ["--window", "0.2", "--warm-up", "0.1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("protocol", ["grpc", "stream", "rest"])
def test_a_closed_loop_runs_in_steps(server: ServerProcess, protocol: str) -> None:
    done = bench(server, "identity", "--protocol", protocol, "--concurrency", "1:4:*4", "--processes", "2", "--json")
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [step["concurrency"] for step in steps] == [1, 4]
    assert [step["generator_processes"] for step in steps] == [1, 2]
    for step in steps:
        assert step["requests_per_s"] > 0
        assert step["rejected"] == {}
        assert 0 < step["generator_cpu_share"] <= 1.5
        histogram = Latencies.decode(step["latency_histogram"])
        assert histogram.percentile_ms(99) == step["latency_ms"]["p99"]
        assert step["latency_ms"]["p50"] <= step["latency_ms"]["p99"] <= step["latency_ms"]["max"]


@pytest.mark.parametrize("protocol", ["grpc", "stream", "rest"])
def test_an_open_loop_sends_at_its_rate(server: ServerProcess, protocol: str) -> None:
    done = bench(server, "identity", "--protocol", protocol, "--rate", "100", "--windows", "5", "--json")
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["steps"]
    assert step["rate"] == 100
    assert 30 < step["requests_per_s"] < 200
    assert len(step["windows_per_s"]) == 3


def test_token_figures_of_generated_text_are_measured(server: ServerProcess) -> None:
    lengths = ("--prompt-tokens", "5-9", "--output-tokens", "4", "--goodput", "ttft:60000,e2el:0.001")
    done = bench(server, "text", "--concurrency", "1,3", *lengths, "--windows", "4", "--json")
    assert done.returncode == 0, done.stderr
    for step in json.loads(done.stdout)["steps"]:
        found = step["generation"]
        assert step["rejected"] == {}
        assert 5 <= found["prompt_tokens_mean"] <= 9
        assert found["output_tokens_mean"] == 4
        assert found["tokens_per_s"] == pytest.approx(4 * step["requests_per_s"], rel=0.5)
        assert found["goodput_per_s"] == 0  # no answer arrives within a microsecond
        assert 0 < found["first_token_ms"]["p50"] <= step["latency_ms"]["p50"] * 1.01
        assert found["between_tokens_ms"]["p50"] <= found["between_tokens_ms"]["p99"]
        assert found["request_tokens_per_s"]["p10"] <= found["request_tokens_per_s"]["p50"]


def test_given_prompts_are_sent_and_shown_in_the_table(server: ServerProcess, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three", "max_tokens": 2}\n')
    done = bench(server, "text", "--prompt-tokens", str(prompts), "--rate", "20", "--windows", "3")
    assert done.returncode == 0, done.stderr
    for expected in ("tokens", "first token ms", "between ms", "3.0", "2.0"):
        assert expected in done.stdout


def test_a_bench_stops_with_the_reason_if_every_request_is_refused(server: ServerProcess) -> None:
    done = bench(server, "absent", "--data", "noop", "--concurrency", "2,4,8")
    assert done.returncode == 2
    assert "with 2 callers: every request was refused" in done.stderr
    assert "NOT_FOUND" in done.stderr
    assert "with 4 callers" not in done.stderr


def test_invalid_options_are_refused(server: ServerProcess) -> None:
    for arguments, message in (
        (("--protocol", "smoke"), "choose one of grpc, stream, rest"),
        (("--rate", "1", "--concurrency", "1"), "give one of them"),
        (("--shape", "x"), "expected NAME:SIZES"),
        (("--data", "photos", "--msmarco", "x"), "leave out --msmarco"),
        (("--data", "prompts", "--prompt-tokens", "many"), "expected 128, a range"),
        (("--data", "prompts", "--whole", "--goodput", "ttft:5"), "no measurable first token"),
    ):
        done = bench(server, "identity", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
    assert "absent" in bench(server, "absent").stderr


def test_an_unreachable_server_is_reported(server: ServerProcess) -> None:
    nobody = ("--server", "http://127.0.0.1:1")
    for protocol in ("grpc", "rest"):
        noop = ("--protocol", protocol, "--data", "noop", "--concurrency", "1")
        done = bench(server, "identity", *noop, *nobody)
        assert done.returncode == 2
        assert "127.0.0.1:1" in done.stderr
