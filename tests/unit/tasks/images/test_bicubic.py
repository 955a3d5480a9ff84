"""Enlarged planes equal Pillow's bit by bit."""

import numpy as np
import pytest
from PIL import Image

from penstock.tasks.images.bicubic import enlarge


@pytest.mark.parametrize("size", [(64, 48), (16, 16), (17, 150), (300, 16), (15, 40), (1, 1), (133, 71)])
@pytest.mark.parametrize("scale", [1, 2, 3])
@pytest.mark.parametrize("kind", ["noise", "extremes", "slope"])
def test_every_pixel_equals_pillow(size: tuple[int, int], scale: int, kind: str) -> None:
    rng = np.random.default_rng(3)
    pixels = {
        "noise": rng.integers(0, 256, size[::-1]),
        "extremes": rng.integers(0, 2, size[::-1]) * 255,
        "slope": np.add.outer(np.arange(size[1]), np.arange(size[0])) % 256,
    }[kind]
    plane = Image.fromarray(pixels.astype(np.uint8))
    expected = plane.resize((size[0] * scale, size[1] * scale), Image.Resampling.BICUBIC)
    assert (enlarge(plane, scale) == np.asarray(expected)).all()
