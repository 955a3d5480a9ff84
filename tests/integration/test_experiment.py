"""Real experiments: servers start and stop, an interruption loses nothing, reports are written."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.waiting import eventually
from tests.measured import AS_IN_THE_SEED
from tests.servers import ROOT

TINY = """
model: {name: identity}
experiment:
  concurrency_levels: [1]
  repeats: 1
  warm_up_s: 0.2
  window_s: 0.3
  most_windows: 3
matrix:
  instances: [1, 2]
"""
QUANTIZED = """
model:
  name: "sentence-transformers/all-MiniLM-L6-v2"
  device: cpu
  quantized: true
experiment:
  batch_sizes: [4]
  concurrency_levels: [2]
  benchmark_requests: 12
  repeats: 1
  warm_up_s: 0.2
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "penstock", "experiment", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def experiment(*arguments: object, expect: int = 0) -> str:
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == expect, done.stderr
    return done.stdout + done.stderr


def results_in(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    except FileNotFoundError:
        return {"cases": []}
    return found


def repeats_in(folder: Path) -> dict[tuple[str, int], Any]:
    return {
        (case["case"]["id"], repeat["number"]): repeat
        for case in results_in(folder)["cases"]
        for repeat in case["repeats"]
    }


@pytest.mark.timeout(400)  # servers one after another
def test_an_interrupted_experiment_is_resumed(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    out = tmp_path / "out"
    folder = out / "tiny"
    running = subprocess.Popen(command("run", file, "--out", out), cwd=ROOT, env=environment())
    try:
        eventually(lambda: repeats_in(folder), "a first case was measured", within_s=90)
        started = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    finally:
        running.kill()
    assert len(started) >= 2  # a server and its worker at least
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    before = repeats_in(folder)
    assert len(before) == 1
    assert "not measured yet" in (folder / "results.md").read_text()
    assert "</html>" in (folder / "report.html").read_text()

    experiment("run", file, "--out", out)
    after = repeats_in(folder)
    assert len(after) == 2
    assert {key: after[key] for key in before} == before
    for repeat in after.values():
        assert repeat["answered"] > 0
        assert repeat["memory_mib"]["worker"] > 10
        assert repeat["samples"]
    assert "not measured yet" not in (folder / "results.md").read_text()
    assert "0 runs to measure" in experiment("run", file, "--out", out)
    assert repeats_in(folder) == after

    # A different setting is a different experiment: it starts over, and earlier results can be compared.
    file.write_text(TINY.replace("window_s: 0.3", "window_s: 0.2"))
    assert "cannot be resumed" in experiment("run", file, "--out", out, "--resume", expect=2)
    assert "starting over" in experiment("run", file, "--out", out, "--only", "*instances=1*")
    assert set(repeats_in(folder)) == {("identity-onnx-fp32-cpu-instances=1-b1-c1", 1)}
    told = json.loads(experiment("compare", folder / "previous.json", "tiny", "--out", out, "--json"))
    assert [case["case"] for case in told["cases"]] == ["identity-onnx-fp32-cpu-instances=1-b1-c1"]
    assert any("window_s" in difference for difference in told["differences"])


def test_an_experiment_without_any_answer_reports_its_cases_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(AS_IN_THE_SEED)
    said = experiment("run", file, "--out", tmp_path, expect=2)
    assert "the torch engine reads TorchScript" in said
    assert "no case has an answer" in said
    cases = results_in(tmp_path / "my_experiment")["cases"]
    assert len(cases) == 3 * 3
    assert all(case["not_run"].startswith("the torch engine reads TorchScript") for case in cases)
    assert "the torch engine reads TorchScript" in (tmp_path / "my_experiment" / "report.html").read_text()


def test_quantized_pairs_are_counted_and_compared_with_fp32(tmp_path: Path) -> None:
    file = tmp_path / "quantized.yaml"
    file.write_text(QUANTIZED)
    experiment("run", file, "--out", tmp_path)
    (case,) = results_in(tmp_path / "quantized")["cases"]
    assert case["case"]["id"] == "minilm-onnx-int8-cpu-b4-c2"
    assert case["unit"] == "pairs"
    assert 0.98 <= case["accuracy"]["mean"] < 1
    (repeat,) = case["repeats"]
    assert repeat["answered"] >= 12
    assert repeat["items_per_s"] == pytest.approx(4 * repeat["requests_per_s"])
    assert list((tmp_path / "variants").glob("*-onnx-int8-*/*.onnx"))


def test_an_invalid_file_does_not_stop_the_others_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "base_config.yaml").write_text("model: {name: minilm, backend: pytorch}\n")
    (folder / "a.yaml").write_text("wrong: 1\n")
    (folder / "b.yaml").write_text("description: the second\n")
    told = experiment("run-all", folder, "--out", tmp_path / "out", expect=2)
    assert f"{folder / 'a.yaml'}:1: unknown key 'wrong'" in told
    assert (tmp_path / "out" / "b" / "results.md").is_file()
    listed = json.loads(experiment("list", folder, "--json"))
    assert [(row["experiment"], row.get("cases"), row.get("run_here")) for row in listed] == [
        ("a", None, None),
        ("b", 3, 0),
    ]
