"""Divides an image into tiles of equal size, with as few tiles as their largest size allows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from penstock.tasks.images.output_options import Size

GRAIN = 16  # pixels; sides are multiples of it

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tiling:
    """A division of an image: the area that each tile covers; a tile also contains a margin around its area."""

    size: Size  # of the image
    width: int
    height: int
    corners: tuple[tuple[int, int], ...]  # top, left

    def join_bands(self, answers: Sequence[Pixels]) -> Iterator[tuple[int, Pixels]]:
        """Join the tiles' answers to bands: yield the top and the pixels of each row of tiles, without overlaps."""
        done = 0
        for top, row in groupby(zip(self.corners, answers, strict=True), key=lambda each: each[0][0]):
            band = _join_row(self.size[0], list(row))
            yield done, band[done - top :]
            done = top + self.height


def divide_image(size: Size, limit: int) -> Tiling:
    """Divide an image into tiles. `limit`: the most pixels along a side of a tile's area."""
    (width, lefts), (height, tops) = (_divide_length(length, limit) for length in size)
    return Tiling(size, width, height, tuple((top, left) for top in tops for left in lefts))


def _join_row(width: int, row: Sequence[tuple[tuple[int, int], Pixels]]) -> Pixels:
    first = row[0][1]
    if len(row) == 1:
        return first
    band = np.empty((len(first), width, *first.shape[2:]), np.uint8)
    for (_, left), answer in row:
        band[:, left : left + answer.shape[1]] = answer
    return band


def _divide_length(length: int, limit: int) -> tuple[int, list[int]]:
    """Return the length that each tile covers, and the start of each tile.

    All tiles have the same length: the image's length divided by the number of tiles, rounded up to a multiple of
    GRAIN. Tiles of length `limit` would overlap more, and up to two thirds of the pixels would be computed twice.
    Multiples of GRAIN give the tiles of similar images the same shape, so that these tiles can be batched.
    """
    count = -(-length // limit)
    even = -(-length // count)
    side = min(-(-even // GRAIN) * GRAIN, limit, length)
    return side, [min(index * side, length - side) for index in range(count)]
