"""The network for `mode: denoise` that ships with Penstock, on photographs that it was not trained on."""

from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image

# Measured: 5.2, 7.3 and 12.5 dB on average; china.jpg is full of fine texture, and gains least.
MODEL = Path(__file__).parents[2] / "models" / "srcnn" / "1" / "denoise.onnx"
PHOTOGRAPHS = [
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/coffee.png"),
    ("sklearn", "datasets/images/china.jpg"),
]
SIDE = 192  # from the middle of each photograph


def read_plane(package: str, path: str, channel: str) -> NDArray[np.float32]:
    with Image.open(BytesIO((files(package) / path).read_bytes())) as image:
        plane = image.convert("RGB").convert("YCbCr").getchannel(channel)
    left, top = (plane.width - SIDE) // 2, (plane.height - SIDE) // 2
    return np.asarray(plane.crop((left, top, left + SIDE, top + SIDE)), np.float32)


def psnr_db(estimate: NDArray[np.float32], truth: NDArray[np.float32]) -> float:
    inner = np.s_[8:-8, 8:-8]
    return float(10 * np.log10(255**2 / np.square(np.rint(estimate[inner].clip(0, 255)) - truth[inner]).mean()))


@pytest.mark.parametrize(("channel", "strength", "min_gain_db"), [("Y", 15, 4.5), ("Y", 25, 6.5), ("Cb", 15, 11.0)])
def test_noise_is_removed(channel: str, strength: float, min_gain_db: float) -> None:
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    rng, gains = np.random.default_rng(5), []
    for package, path in PHOTOGRAPHS:
        truth = read_plane(package, path, channel)
        noisy = np.rint((truth + rng.normal(0, strength, truth.shape)).clip(0, 255)).astype(np.float32)
        (answer,) = session.run(["denoised"], {"plane": noisy[None, None] / np.float32(255)})
        gains.append(psnr_db(answer[0, 0] * 255, truth) - psnr_db(noisy, truth))
        print(f"{path} {channel} {strength}: {gains[-1]:+.2f} dB")
    assert np.mean(gains) >= min_gain_db
    assert min(gains) > 0


def test_an_image_without_noise_stays_nearly_unchanged() -> None:
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    truth = read_plane(*PHOTOGRAPHS[1], "Y")
    (answer,) = session.run(["denoised"], {"plane": truth[None, None] / np.float32(255)})
    assert psnr_db(answer[0, 0] * 255, truth) > 36


def test_the_model_file_is_small_enough_for_the_repository() -> None:
    assert MODEL.stat().st_size < 500_000
