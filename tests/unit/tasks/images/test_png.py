"""PNG files written in bands have the same pixels, whatever the size of the bands."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageCms

from penstock.models.samples.photos import photos
from penstock.tasks.images.png import Rows, encode_png


def read(parts: list[bytes]) -> Image.Image:
    image = Image.open(BytesIO(b"".join(parts)))
    image.load()
    return image


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_pixels_survive_encoding(channels: int, mode: str, rows: int) -> None:
    rng = np.random.default_rng(channels)
    pixels: Rows = np.cumsum(rng.integers(0, 4, (40, 31, channels)), axis=1).astype(np.uint8)
    bands = [pixels[top : top + rows] for top in range(0, 40, rows)]
    image = read(encode_png((31, 40), bands, None))
    assert (image.mode, image.size) == (mode, (31, 40))
    assert (np.asarray(image).reshape(pixels.shape) == pixels).all()


def test_rows_wider_than_a_filter_step_survive_encoding() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 200_000, 3)).astype(np.uint8)
    assert (np.asarray(read(encode_png((200_000, 3), [pixels], None))) == pixels).all()


def test_photograph_is_as_small_as_with_other_encoders() -> None:
    photo = Image.open(BytesIO(photos()[0])).convert("RGB")
    file = BytesIO()
    photo.save(file, "PNG", compress_level=1)
    parts = encode_png(photo.size, [np.asarray(photo)], None)
    assert sum(map(len, parts)) < 1.05 * len(file.getvalue())


def test_a_colour_profile_is_kept() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = read(encode_png((1, 1), [np.zeros((1, 1, 3), np.uint8)], profile))
    assert image.info["icc_profile"] == profile
