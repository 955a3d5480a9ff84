"""Encodes an answer's image with the requested output options."""

from collections.abc import Iterable
from io import BytesIO

import numpy as np
from PIL import Image

from penstock.tasks.images.output_options import PNG, WEBP, OutputOptions, Size
from penstock.tasks.images.png import Rows, encode_png

WEBP_EFFORT = 2  # from 0 to 6
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # by channels


def write_file(
    output: OutputOptions, bands: Iterable[Rows], sizes: tuple[Size, Size], profile: bytes | None, colors: str
) -> list[bytes]:
    """Encode an image, given as bands of rows; return the parts of the file, to be joined.

    `sizes`: the size of all bands together, and the requested size. `colors`: the mode of bands with three channels.
    """
    made, requested = sizes
    if output.format == PNG and made == requested:
        return encode_png(made, bands, profile)  # band by band, so that the whole image is never in memory
    image = _join_bands(bands, made, colors)
    if made != requested:
        image = image.resize(requested, Image.Resampling.BICUBIC)
    if output.format == PNG:
        return encode_png(requested, [np.asarray(image).reshape(image.height, image.width, -1)], profile)
    file = BytesIO()
    image.save(
        file,
        output.format,
        quality=output.quality,
        icc_profile=profile,
        **({"method": WEBP_EFFORT} if output.format == WEBP else {}),
    )
    return [file.getvalue()]


def _join_bands(bands: Iterable[Rows], size: Size, colors: str) -> Image.Image:
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
