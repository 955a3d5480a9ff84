"""Bicubic interpolation of planes: Pillow's, and the same pixels in half the time where they are doubled."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from penstock.tasks.images.tiling import Pixels

# A doubled pixel lies a quarter beside the middle of a pixel, whose neighbours count by these, of 128; the last two
# are taken away. They are exact, so the sums are to the bit what Pillow rounds.
WEIGHTS = np.array([111, 29, 9, 3], np.int16)
SHIFT = 7
REACH = 2  # pixels to either side that count
BORDER = 8  # pixels: Pillow does those at the border, where neighbours are missing
BLOCK_ROWS = 64  # at a time: what fits into a processor's cache

Sums = NDArray[np.int16]


def enlarge(plane: Image.Image, scale: int) -> Pixels:
    if scale == 1:
        return np.asarray(plane)
    if scale == 2 and min(plane.size) >= 2 * BORDER:
        return _double(plane)
    return _by_pillow(plane, scale)


def _by_pillow(plane: Image.Image, scale: int) -> Pixels:
    return np.asarray(plane.resize((plane.width * scale, plane.height * scale), Image.Resampling.BICUBIC))


def _double(plane: Image.Image) -> Pixels:
    width, height = plane.size
    pixels = np.asarray(plane)
    doubled = np.empty((2 * height, 2 * width), np.uint8)
    inner = doubled[:, 2 * REACH : -2 * REACH]
    for top in range(REACH, height - REACH, BLOCK_ROWS):
        bottom = min(top + BLOCK_ROWS, height - REACH)
        block = pixels[top - REACH : bottom + REACH].astype(np.int16)
        block -= 128  # so that sums fit into sixteen bits
        wide = np.empty((len(block), inner.shape[1]), np.int16)
        wide[:, ::2], wide[:, 1::2] = _between(block, 1)
        upper, lower = _between(wide, 0)
        upper += 128
        lower += 128
        inner[2 * top : 2 * bottom : 2], inner[2 * top + 1 : 2 * bottom : 2] = upper, lower
    ends = slice(None, 2 * REACH), slice(-2 * REACH, None)
    near = (
        _by_pillow(plane.crop((0, 0, BORDER, height)), 2),
        _by_pillow(plane.crop((width - BORDER, 0, width, height)), 2),
    )
    for end, strip in zip(ends, near, strict=True):
        doubled[:, end] = strip[:, end]
    near = (
        _by_pillow(plane.crop((0, 0, width, BORDER)), 2),
        _by_pillow(plane.crop((0, height - BORDER, width, height)), 2),
    )
    for end, strip in zip(ends, near, strict=True):
        doubled[end] = strip[end]
    return doubled


def _between(given: Sums, axis: int) -> tuple[Sums, Sums]:
    """The pixels a quarter before and a quarter behind each but the outermost, along an axis."""
    count = given.shape[axis] - 2 * REACH

    def beside(sums: Sums, pixels: int) -> Sums:
        start = REACH + pixels
        return sums[:, start : start + count] if axis else sums[start : start + count]

    nearest, second, third, fourth = (given * weight for weight in WEIGHTS)
    nearest += 1 << (SHIFT - 1)
    found = []
    for way in (-1, 1):
        sums = beside(nearest, 0) + beside(second, way)
        sums -= beside(third, -way)
        sums -= beside(fourth, 2 * way)
        sums >>= SHIFT
        found.append(np.clip(sums, -128, 127, out=sums))
    return found[0], found[1]
