"""Tuning end to end: servers are measured in turns, the winner is written and serves, interruptions are harmless."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.cli import main as cli
from penstock.core.errors import PenstockError
from tests.servers import ROOT, floats_json, write_identity

# A delay for every request: without it the model answers many times as often, however noisy the machine is.
DELAYED = """\
batching:
  max_delay_ms: 150 # company is worth waiting for
instances: {count: 1}
"""
SHAPE = ("--shape", "x:1,8")
FAST = ("--concurrency", "4", "--window", "0.15")


def tune(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "tune", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == expect, done.stderr
    return done


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def children(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_identity(tmp_path / "models", "slow", "FP32", DELAYED)
    return tmp_path / "models"


def test_the_winner_is_written_and_serves(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kept = ("--keep", "engine", "--keep", "instances", "--keep", "batching")
    done = tune(
        "slow", "--models", models, "--output", out, *kept, *SHAPE, *FAST, "--minutes", 0.3, "--p99-ms", 100, "--json"
    )
    record = json.loads(done.stdout)
    delay = record["winner"]["max_delay_ms"]
    assert delay in (0, 1, 4)
    assert record["changes"] == {"batching.max_delay_ms": delay}
    assert record["is_met"]
    shipped = next(final for final in record["finals"] if final["configuration"] == record["shipped"])
    assert shipped["p99_ms"] > 100
    assert not shipped["is_within"]
    assert record == json.loads((out / "slow" / "report.json").read_text())
    assert "delay: onnx fp32" in done.stderr
    assert "finals: onnx fp32" in done.stderr

    text = (models / "slow" / "model.yaml").read_text()
    assert re.search(rf"max_delay_ms: {delay:.1f} # was 150: company is worth waiting for\n", text)
    assert f"+  max_delay_ms: {delay:.1f}" in (out / "slow" / "report.md").read_text()
    (backup,) = record["applied"]["files"].values()
    assert yaml.safe_load(Path(ROOT, backup).read_text())["batching"] == {"max_delay_ms": 150}
    with ServerProcess(models, tmp_path / "server") as server:
        answer = httpx.post(f"{server.http_url}/v2/models/slow/infer", json=floats_json(1.0, 2.0), timeout=30)
        assert answer.json()["outputs"][0]["data"] == [1.0, 2.0]


def test_an_interruption_leaves_the_model_unchanged_and_no_server_running(models: Path, tmp_path: Path) -> None:
    before = (models / "slow" / "model.yaml").read_bytes()
    arguments = [
        "slow",
        "--models",
        models,
        "--output",
        tmp_path / "out",
        "--keep",
        "engine",
        *FAST,
        *SHAPE,
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "tune", *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "/s, p99" in line:
                break
        started = children(process)
        assert len(started) >= 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
        said = process.stderr.read()
        assert process.wait(60) == 130, said
    assert "the model was not changed" in said
    assert "Traceback" not in said
    eventually(lambda: not any(child.is_running() for child in started), "all of its processes are gone")
    assert (models / "slow" / "model.yaml").read_bytes() == before
    record = json.loads((tmp_path / "out" / "slow" / "report.json").read_text())
    assert record["winner"] is None
    assert "Interrupted: nothing was decided" in (tmp_path / "out" / "slow" / "report.md").read_text()


def test_models_that_cannot_be_tuned_are_reported_at_once(models: Path, tmp_path: Path) -> None:
    out = ("--models", models, "--output", tmp_path / "out")
    for arguments, said in (
        (("fast",), f"there is no model 'fast' in {models}; its models are slow"),
        (("slow", "--keep", "everything"), "--keep everything: choose from engine"),
        (("slow",), "such as --shape x:1,128"),
    ):
        found = CliRunner().invoke(cli.app, ["tune", *map(str, (*arguments, *out))])
        assert isinstance(found.exception, PenstockError), found.output
        assert said in found.exception.message
    (models / "slow" / "1" / "model.onnx").write_bytes(b"no graph")
    said = tune("slow", *out, *SHAPE, expect=2).stderr
    assert "slow: the current settings do not work: the model cannot be loaded" in said
