"""The SRCNN that ships with Penstock beats bicubic on photographs that it was not trained on."""

from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image

MODEL = Path(__file__).parents[2] / "models" / "srcnn" / "1" / "model.onnx"
PHOTOGRAPHS = [
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/camera.png"),
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/rocket.jpg"),
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
]
SHAVED = 8
# Measured: 1.97 dB on average, and from 0.65 (china.jpg) to 3.20 (flower.jpg).
MIN_MEAN_GAIN_DB = 1.75
MIN_GAIN_DB = 0.45


def read_luminance(package: str, path: str) -> Image.Image:
    """Return the luminance with even sides, so that halving and doubling give the same size."""
    with Image.open(BytesIO((files(package) / path).read_bytes())) as image:
        plane = image.convert("RGB").convert("YCbCr").getchannel("Y")
    return plane.crop((0, 0, plane.width // 2 * 2, plane.height // 2 * 2))


def psnr_db(estimate: NDArray[np.uint8], truth: NDArray[np.uint8]) -> float:
    inner = np.s_[SHAVED:-SHAVED, SHAVED:-SHAVED]
    error = np.square(estimate[inner].astype(np.float64) - truth[inner]).mean()
    return float(10 * np.log10(255**2 / error))


def sharpen(session: onnxruntime.InferenceSession, plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    given = (plane / np.float32(255)).astype(np.float32)[np.newaxis, np.newaxis]
    (answer,) = session.run(["luminance_sr"], {"luminance": given})
    found: NDArray[np.uint8] = np.rint(np.clip(answer[0, 0] * 255, 0, 255)).astype(np.uint8)
    return found


@pytest.fixture(scope="module")
def gains_db() -> dict[str, float]:
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    gains = {}
    for package, path in PHOTOGRAPHS:
        original = read_luminance(package, path)
        half = original.resize((original.width // 2, original.height // 2), Image.Resampling.BICUBIC)
        bicubic = np.asarray(half.resize(original.size, Image.Resampling.BICUBIC))
        truth = np.asarray(original)
        before, after = psnr_db(bicubic, truth), psnr_db(sharpen(session, bicubic), truth)
        print(f"{path:30s} bicubic {before:.2f} dB, SRCNN {after:.2f} dB, {after - before:+.2f}")
        gains[path] = after - before
    return gains


@pytest.mark.parametrize("path", [path for _, path in PHOTOGRAPHS])
def test_every_photograph_is_better_than_bicubic(gains_db: dict[str, float], path: str) -> None:
    assert gains_db[path] >= MIN_GAIN_DB


def test_the_mean_gain_is_close_to_the_measured_one(gains_db: dict[str, float]) -> None:
    assert np.mean(list(gains_db.values())) >= MIN_MEAN_GAIN_DB


def test_the_network_accepts_any_batch_and_size() -> None:
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == (
        "luminance",
        "tensor(float)",
        ["batch", 1, "height", "width"],
    )
    assert (answer.name, answer.shape) == ("luminance_sr", given.shape)


def test_the_model_file_is_small_enough_for_the_repository() -> None:
    assert MODEL.stat().st_size < 500_000
