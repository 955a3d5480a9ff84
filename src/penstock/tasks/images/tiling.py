"""How an image is divided into tiles: as few as a limit allows, of one size, and what of it each answers for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from penstock.tasks.images.wishes import Size

GRAIN = 16  # pixels

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tiling:
    """The part of the image that each tile answers for; the tile itself is larger by a margin."""

    size: Size  # of the image
    width: int
    height: int
    corners: tuple[tuple[int, int], ...]  # top, left

    def lay(self, answers: Sequence[Pixels]) -> Iterator[tuple[int, Pixels]]:
        """Yields (top, pixels) of a row of tiles; the last leaves out what the one before has of it."""
        done = 0
        for top, row in groupby(zip(self.corners, answers, strict=True), key=lambda each: each[0][0]):
            band = _beside(self.size[0], list(row))
            yield done, band[done - top :]
            done = top + self.height


def tile(size: Size, limit: int) -> Tiling:
    """`limit`: pixels along the side of what a tile answers for."""
    (width, lefts), (height, tops) = (_divide(length, limit) for length in size)
    return Tiling(size, width, height, tuple((top, left) for top in tops for left in lefts))


def _beside(width: int, row: Sequence[tuple[tuple[int, int], Pixels]]) -> Pixels:
    first = row[0][1]
    if len(row) == 1:
        return first
    band = np.empty((len(first), width, *first.shape[2:]), np.uint8)
    for (_, left), answer in row:
        band[:, left : left + answer.shape[1]] = answer
    return band


def _divide(length: int, limit: int) -> tuple[int, list[int]]:
    """Returns (how much of a side each tile answers for, where each starts).

    As few tiles as the limit allows, and those of one length: a network's time goes by pixels, and tiles of
    the full length with the last moved far inward would compute up to two thirds of them twice. The grain
    lets images of like sizes have tiles of one shape.
    """
    count = -(-length // limit)
    even = -(-length // count)
    side = min(-(-even // GRAIN) * GRAIN, limit, length)
    return side, [min(index * side, length - side) for index in range(count)]
