"""Enlarges image planes by bicubic interpolation: with Pillow, or for scale 2 with equal results in half the time."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from penstock.tasks.images.tiling import Pixels

# Weights of the four nearest pixels, in units of 1/128; the last two are subtracted. The centre of each new pixel is a
# quarter of a pixel beside the centre of its source. The weights are exact, so the sums equal Pillow's bit by bit.
WEIGHTS = np.array([111, 29, 9, 3], np.int16)
SHIFT = 7
REACH = 2  # neighbours on either side that have a weight
BORDER = 8  # pixels at the border, which lack neighbours, are left to Pillow
BLOCK_ROWS = 64  # rows per step, which fit into a processor's cache

Sums = NDArray[np.int16]


def enlarge(plane: Image.Image, scale: int) -> Pixels:
    if scale == 1:
        return np.asarray(plane)
    if scale == 2 and min(plane.size) >= 2 * BORDER:
        return _double_size(plane)
    return _enlarge_with_pillow(plane, scale)


def _enlarge_with_pillow(plane: Image.Image, scale: int) -> Pixels:
    return np.asarray(plane.resize((plane.width * scale, plane.height * scale), Image.Resampling.BICUBIC))


def _double_size(plane: Image.Image) -> Pixels:
    width, height = plane.size
    pixels = np.asarray(plane)
    doubled = np.empty((2 * height, 2 * width), np.uint8)
    inner = doubled[:, 2 * REACH : -2 * REACH]
    for top in range(REACH, height - REACH, BLOCK_ROWS):
        bottom = min(top + BLOCK_ROWS, height - REACH)
        block = pixels[top - REACH : bottom + REACH].astype(np.int16)
        block -= 128  # so that sums fit into sixteen bits
        wide = np.empty((len(block), inner.shape[1]), np.int16)
        wide[:, ::2], wide[:, 1::2] = _interpolate(block, 1)
        upper, lower = _interpolate(wide, 0)
        upper += 128
        lower += 128
        inner[2 * top : 2 * bottom : 2], inner[2 * top + 1 : 2 * bottom : 2] = upper, lower
    ends = slice(None, 2 * REACH), slice(-2 * REACH, None)
    near = (
        _enlarge_with_pillow(plane.crop((0, 0, BORDER, height)), 2),
        _enlarge_with_pillow(plane.crop((width - BORDER, 0, width, height)), 2),
    )
    for end, strip in zip(ends, near, strict=True):
        doubled[:, end] = strip[:, end]
    near = (
        _enlarge_with_pillow(plane.crop((0, 0, width, BORDER)), 2),
        _enlarge_with_pillow(plane.crop((0, height - BORDER, width, height)), 2),
    )
    for end, strip in zip(ends, near, strict=True):
        doubled[end] = strip[end]
    return doubled


def _interpolate(pixels_in: Sums, axis: int) -> tuple[Sums, Sums]:
    """Return the interpolated values a quarter of a pixel before and after each inner pixel, along an axis."""
    count = pixels_in.shape[axis] - 2 * REACH

    def beside(sums: Sums, pixels: int) -> Sums:
        start = REACH + pixels
        return sums[:, start : start + count] if axis else sums[start : start + count]

    nearest, second, third, fourth = (pixels_in * weight for weight in WEIGHTS)
    nearest += 1 << (SHIFT - 1)
    found = []
    for side in (-1, 1):
        sums = beside(nearest, 0) + beside(second, side)
        sums -= beside(third, -side)
        sums -= beside(fourth, 2 * side)
        sums >>= SHIFT
        found.append(np.clip(sums, -128, 127, out=sums))
    return found[0], found[1]
