"""`penstock model build`: engines that are built before a worker needs them, without a GPU."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.errors import ConfigError, UnknownModel
from tests.servers import write_identity

pytest.importorskip("tensorrt_rtx_bindings")  # not installed on every machine
SRCNN = Path(__file__).parents[4] / "models" / "srcnn"
SETTINGS = "task: upscale\nengine: tensorrt\nbatching: {max_rows: 2}\nupscale: {tile: 64}\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(SRCNN, tmp_path / "models" / "srcnn")
    (tmp_path / "models" / "srcnn" / "model.yaml").write_text(SETTINGS)
    write_identity(tmp_path / "models", "other", "FP32")
    return tmp_path / "models"


def build(repository: Path, *arguments: str) -> list[dict[str, object]]:
    data = repository.parent / "data"
    options = ["--repository", str(repository), "--data-dir", str(data), "--json"]
    result = CliRunner().invoke(cli.app, ["model", "build", *arguments, *options], catch_exceptions=False)
    rows: list[dict[str, object]] = json.loads(result.stdout)
    return rows


def test_an_engine_is_built_once_and_again_after_any_change(repository: Path) -> None:
    (row,) = build(repository)
    assert [row[key] for key in ("model", "version", "library", "device", "precision")] == [
        "srcnn",
        "1",
        "tensorrt_rtx",
        "any",
        "fp32",
    ]
    assert row["profiles"] == [{"luminance": {"min": [1, 1, 1, 1], "opt": [2, 1, 64, 64], "max": [2, 1, 64, 64]}}]
    assert row["is_built"]
    file = repository.parent / "data" / "engines" / str(row["file"])
    assert file.stat().st_size > int(str(row["size_bytes"])) > 10_000
    assert build(repository, "srcnn") == [{**row, "is_built": False, "build_s": 0.0}]
    assert build(repository, "srcnn", "--force")[0]["is_built"]
    (repository / "srcnn" / "model.yaml").write_text(SETTINGS + "tensorrt: {capabilities: [8.9, 12.0]}\n")
    (other,) = build(repository, "srcnn", "--version", "1")
    assert (other["device"], other["is_built"]) == ("8.9,12.0", True)
    assert other["file"] != row["file"]
    shutil.copy(repository / "srcnn" / "1" / "model.onnx", repository / "srcnn" / "1" / "second.onnx")
    (repository / "srcnn" / "model.yaml").write_text(SETTINGS.replace("tile: 64", "tile: 64, denoise: second.onnx"))
    found = build(repository, "srcnn")
    assert [(each["network"], each["file"]) for each in found] == [
        ("model.onnx", row["file"]),
        ("second.onnx", row["file"]),  # the same bytes
    ]
    (repository / "srcnn" / "model.yaml").write_text(SETTINGS + "tensorrt: {capabilities: [8.9, 12.0]}\n")
    shown = CliRunner().invoke(
        cli.app,
        ["model", "build", "-r", str(repository), "--data-dir", str(repository.parent / "data")],
        catch_exceptions=False,
    )
    assert f"srcnn version 1, model.onnx: {other['file']} exists" in shown.stdout


def test_a_model_that_cannot_be_built_is_reported(repository: Path) -> None:
    with pytest.raises(ConfigError, match="has engine: onnx, which needs no build"):
        build(repository, "other")
    with pytest.raises(ConfigError, match="has no version 7"):
        build(repository, "srcnn", "--version", "7")
    with pytest.raises(UnknownModel):
        build(repository, "nobody")
    (repository / "srcnn" / "1" / "model.onnx").write_bytes(b"\x08\x07torn")
    with pytest.raises(ConfigError, match="is not an ONNX file"):
        build(repository, "srcnn")
    shutil.rmtree(repository / "srcnn")
    with pytest.raises(ConfigError, match="no model has engine: tensorrt"):
        build(repository)
