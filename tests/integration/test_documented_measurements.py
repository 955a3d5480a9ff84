"""The documentation's commands that measure or convert models run as written, on small models with the same names."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.integration.test_documented_commands import ALL, SMALL, reason_not_to_run, run
from tests.servers import ROOT
from tests.small_models import write_dense, write_encoder, write_upscaler

MODELS = {
    "docs/tensorrt.md": "task: upscale\nengine: tensorrt\nupscale: {tile: 512}\n",
}
UPSCALE = "task: upscale\nengine: onnx\nupscale: {tile: 512}\n"
EMBED = "task: embed\nengine: onnx\nbatching: {max_rows: 32, max_tokens: 256}\n"
TRIAL = "--keep engine --keep instances --keep batching --keep delay --minutes 0.1 --window 0.1"
# Options added to commands that would take minutes: test_tune.py and test_quantize.py search.
SHORT = {
    "penstock tune mymodel": TRIAL,
    "penstock tune minilm": TRIAL,
    "penstock tune minilm --p99-ms 200": TRIAL,
    "penstock tune minilm --min-accuracy 0.995": TRIAL,
    "penstock tune minilm --data texts.txt --dry-run": TRIAL,
    "penstock model quantize minilm": "--method dynamic",
    "penstock model quantize minilm --version 1 --repository /tmp/models --json > minilm.json": "--method dynamic",
    "penstock model quantize srcnn --version 1 --repository /tmp/models --json > srcnn.json": "--method dynamic",
}
# The experiments of the repository with short windows and few cases: all others inherit from this file.
BASE = """\
model: {name: sentence-transformers/all-MiniLM-L6-v2}
experiment: {concurrency_levels: [1], repeats: 1, warm_up_s: 0, window_s: 0.2, most_windows: 3}
"""
FOLDERS = ("/tmp/models", "/var/lib/penstock")
# Commands that cannot succeed on a machine without a GPU, and what they say.
REFUSED = {"penstock bench srcnn --device cuda:0": "it needs an NVIDIA GPU with its driver"}
PAGES = [page for page, found in ALL.items() if any(reason_not_to_run(command) == SMALL for command in found)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "experiments").mkdir()
    for name in ("minilm_baseline.yaml", "minilm_onnx.yaml"):
        shutil.copy(ROOT / "experiments" / name, folder / "experiments")
    (folder / "experiments" / "base_config.yaml").write_text(BASE)
    (folder / "texts.txt").write_text("The river rises in spring.\nWater levels climb after winter.\n")
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(8):
        noise = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        noise.resize((64, 64)).save(folder / "photos" / f"{number}.png")
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_commands_that_measure_run_as_written(page: str, folder: Path) -> None:
    models = folder / "models"
    shutil.rmtree(models, ignore_errors=True)
    write_encoder(models, "minilm", EMBED)
    shutil.copy(ROOT / "models/minilm/1/tokenizer.json", models / "minilm" / "1")
    write_upscaler(models, "srcnn", MODELS.get(page, UPSCALE))
    write_dense(models, "mymodel")
    failed = []
    for command in ALL[page]:
        if reason_not_to_run(command) != SMALL:
            continue
        text = f"{command} {SHORT.get(command, '')}"
        for place in FOLDERS:
            text = text.replace(place, f"own{place}")
        done = run(f"mkdir -p own/tmp && {text}", folder)
        said = REFUSED.get(command, "")
        if bool(done.returncode) != bool(said) or said not in done.stderr:
            failed.append(f"{command}\n→ {done.returncode}: {done.stdout[-500:]}{done.stderr[-1000:]}")
    assert not failed, "\n\n".join(failed)


def test_every_shortened_command_is_documented() -> None:
    everything = {command for found in ALL.values() for command in found}
    assert {*SHORT, *REFUSED} <= everything
    assert all(re.search(place, " ".join(everything)) for place in FOLDERS)
