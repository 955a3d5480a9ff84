"""An answer's file, as its request wishes it."""

from collections.abc import Iterable
from io import BytesIO

import numpy as np
from PIL import Image

from penstock.tasks.images.png import Rows, encode_png
from penstock.tasks.images.wishes import PNG, WEBP, ImageWishes, Size

WEBP_EFFORT = 2  # of 0 to 6
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # by channels


def write_file(
    wishes: ImageWishes, bands: Iterable[Rows], sizes: tuple[Size, Size], profile: bytes | None, colors: str
) -> list[bytes]:
    """The file's parts. `sizes`: what the bands make, and what is wished for. `colors`: of bands of three channels."""
    made, wished = sizes
    if wishes.format == PNG and made == wished:
        return encode_png(made, bands, profile)  # a band at a time: the whole of it is never in memory
    image = _assemble(bands, made, colors)
    if made != wished:
        image = image.resize(wished, Image.Resampling.BICUBIC)
    if wishes.format == PNG:
        return encode_png(wished, [np.asarray(image).reshape(image.height, image.width, -1)], profile)
    file = BytesIO()
    image.save(
        file,
        wishes.format,
        quality=wishes.quality,
        icc_profile=profile,
        **({"method": WEBP_EFFORT} if wishes.format == WEBP else {}),
    )
    return [file.getvalue()]


def _assemble(bands: Iterable[Rows], size: Size, colors: str) -> Image.Image:
    image: Image.Image | None = None
    top = 0
    for band in bands:
        rows, width, channels = band.shape
        mode = colors if channels == 3 else MODES[channels]
        part = Image.frombuffer(mode, (width, rows), np.ascontiguousarray(band), "raw", mode, 0, 1)
        if part.size == size:
            return part
        image = image or Image.new(mode, size)
        image.paste(part, (0, top))
        top += rows
    assert image is not None, "an image has rows"
    return image
