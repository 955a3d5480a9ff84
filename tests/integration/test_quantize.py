"""`penstock model quantize` on the packaged models: its report is recomputed, and both versions serve together."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.client import Client
from penstock.core.tensors import TensorSpec, unpack_bytes
from penstock.models.convert.calibration_samples import collect_samples
from penstock.models.folder import read_model_folder
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import passages, queries
from penstock.tasks.base import TaskSignature
from tests.servers import ROOT

SETTINGS = {
    "minilm": "task: embed\nengine: onnx\nprecision: fp32\nversions: all\nbatching:\n  max_tokens: 256\n",
    "srcnn": "task: upscale\nengine: openvino\nprecision: fp32\nversions: all\nupscale:\n  tile: 512\n  overlap: 8\n",
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "model", "quantize", *arguments]


def add_model(repository: Path, name: str) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    for file in (ROOT / "models" / name / "1").iterdir():
        (folder / "1" / file.name).symlink_to(file)
    (folder / "model.yaml").write_text(SETTINGS[name])
    return folder


def quantize(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        command(str(folder), *arguments, "--json"), capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize")
    for name in SETTINGS:
        add_model(folder / "models", name)
    texts = [*queries()[:40], *passages()[:60]]
    (folder / "texts.txt").write_text("\n".join(" ".join(text.split()) for text in texts))
    return folder / "models"


@pytest.fixture(scope="module")
def minilm(repository: Path) -> dict[str, Any]:
    texts = repository.parent / "texts.txt"
    return quantize(repository / "minilm", "--method", "dynamic", "--calibration", str(texts))


@pytest.fixture(scope="module")
def srcnn(repository: Path) -> dict[str, Any]:
    return quantize(repository / "srcnn", "--method", "openvino")


@pytest.fixture(scope="module")
def server(repository: Path, minilm: dict[str, Any], srcnn: dict[str, Any]) -> "ServerProcess":  # type: ignore[misc]
    with ServerProcess(repository, repository.parent / "server") as running:
        yield running


class TakesTexts:
    signature = TaskSignature((TensorSpec("text", "BYTES", (-1, 1)),), (), 32)


def held_out(repository: Path) -> list[list[str]]:
    """Return held-out queries and passages."""
    samples = collect_samples("embed", TakesTexts(), repository.parent / "texts.txt")  # type: ignore[arg-type]
    return [[unpack_bytes(request.inputs[0])[0].decode() for request in group] for group in samples.held_out]


def bare_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Use ONNX Runtime and the tokenizer alone, one text at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.no_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    rows = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        rows.append(session.run(["sentence_embedding"], inputs)[0][0])
    return np.stack(rows)


def test_the_report_equals_a_measurement_with_the_bare_runtime(repository: Path, minilm: dict[str, Any]) -> None:
    asked, ranked = held_out(repository)
    assert minilm["samples"]["held_out"] == len(asked) + len(ranked) == minilm["accuracy"]["samples"]
    both = [bare_vectors(repository / "minilm" / version, [*asked, *ranked]) for version in ("1", "2")]
    one, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in both)
    cosine = np.sum(one * other, axis=1)
    said = minilm["accuracy"]["details"]
    # Fusing a sum before a rounding changes a byte here and there.
    assert said["cosine"]["mean"] == pytest.approx(cosine.mean(), abs=1e-3)
    assert said["cosine"]["min"] == pytest.approx(cosine.min(), abs=5e-3)
    assert said["cosine"]["p50"] == pytest.approx(np.percentile(cosine, 50), abs=2e-3)
    assert minilm["accuracy"]["value"] == said["cosine"]["mean"] >= 0.98
    count = len(asked)
    before, after = (rows[:count] @ rows[count:].T for rows in (one, other))
    orders = [np.argsort(np.argsort(scores, axis=1), axis=1) for scores in (before, after)]
    correlations = [np.corrcoef(a, b)[0, 1] for a, b in zip(*orders, strict=True)]
    assert said["ranks"]["spearman"] == pytest.approx(np.mean(correlations), abs=5e-3)
    top = [[set(row[-10:]) for row in np.argsort(scores, axis=1)] for scores in (before, after)]
    overlap = np.mean([len(a & b) / 10 for a, b in zip(*top, strict=True)])
    assert said["ranks"]["top10_overlap"] == pytest.approx(overlap, abs=0.03)
    best = np.mean(before.argmax(axis=1) == after.argmax(axis=1))
    assert said["ranks"]["top1_agreement"] == pytest.approx(best, abs=2.5 / count)
    assert (said["ranks"]["queries"], said["ranks"]["passages"]) == (count, len(ranked))


def test_the_reported_size_is_that_of_the_files(repository: Path, minilm: dict[str, Any]) -> None:
    sizes = [(repository / "minilm" / version / "model.onnx").stat().st_size for version in ("1", "2")]
    assert minilm["original"]["size_bytes"] == sizes[0]
    assert minilm["size"] == {"bytes": sizes[1], "of_original": round(sizes[1] / sizes[0], 4)}
    assert sizes[1] < 0.3 * sizes[0]


def test_both_versions_are_served_side_by_side(server: ServerProcess, repository: Path, minilm: dict[str, Any]) -> None:
    text = np.array([["Rain fell on the harbour all night."]], dtype=object)
    with Client(server.grpc) as client:
        rows = [client.infer("minilm", {"text": text}, version=version)["embedding"][0] for version in ("1", "2", "")]
    cosine = [float(rows[0] @ row / np.linalg.norm(rows[0]) / np.linalg.norm(row)) for row in rows]
    assert 0.97 < cosine[1] < 0.99999
    assert np.array_equal(rows[2], rows[1])  # the newest version if none is named
    for model, version, precision in (("minilm", 1, "fp32"), ("minilm", 2, "int8"), ("srcnn", 2, "int8")):
        config = httpx.get(f"{server.http_url}/v2/models/{model}/versions/{version}/config", timeout=30).json()
        assert config["parameters"]["precision"]["string_value"] == precision


def test_the_reported_psnr_is_that_of_the_served_images(server: ServerProcess, srcnn: dict[str, Any]) -> None:
    """Use halves of the photographs, every other one."""
    halves = []
    for photo in photos():
        image = Image.open(io.BytesIO(photo)).convert("RGB")
        for left in (0, image.width // 2):
            stream = io.BytesIO()
            image.crop((left, 0, left + image.width // 2, image.height)).save(stream, "PNG")
            halves.append(stream.getvalue())
    values = []
    with Client(server.grpc) as client:
        for half in halves[::2]:
            inputs = {"image": np.array([[half]], dtype=object)}
            answers = [client.infer("srcnn", inputs, version=version)["image"].flat[0] for version in ("1", "2")]
            pixels = [np.asarray(Image.open(io.BytesIO(answer)), np.float64) for answer in answers]
            values.append(10 * np.log10(255**2 / np.mean((pixels[0] - pixels[1]) ** 2)))
    said = srcnn["accuracy"]["details"]["psnr_db"]
    assert srcnn["accuracy"]["samples"] == len(values) == 7
    assert said["mean"] == pytest.approx(np.mean(values), abs=0.3)
    assert said["min"] == pytest.approx(min(values), abs=0.3)
    assert said["mean"] >= 40


def test_a_killed_command_leaves_the_model_unchanged(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "minilm")
    process = subprocess.Popen(command(str(folder), "--method", "dynamic"), stderr=subprocess.PIPE)
    eventually(lambda: list(folder.glob(".quantize-*/.work")), "it works", 60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    found = read_model_folder(folder)
    assert found.versions == ("1",)
    assert (folder / "model.yaml").read_text() == SETTINGS["minilm"]
    assert [child.name for child in folder.iterdir() if not child.name.startswith(".")].count("2") == 0
