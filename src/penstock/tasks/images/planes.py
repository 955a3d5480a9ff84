"""The pipeline for networks that only sharpen planes (FP32, 0 to 1). This module enlarges and converts colours.

As in SRCNN's paper, bicubic interpolation enlarges all planes, and the network then sharpens the luminance plane.
Colours and transparency are only interpolated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from penstock.core.tensors import Array
from penstock.tasks.base import Piece
from penstock.tasks.images.bicubic import enlarge
from penstock.tasks.images.output_options import Size
from penstock.tasks.images.pipeline import ImageNetwork
from penstock.tasks.images.png import Rows
from penstock.tasks.images.tiling import Pixels, Tiling, divide_image

REACH = 3  # pixels above and below within reach of bicubic interpolation, plus one


@dataclass(frozen=True, slots=True)
class _WaitingPlanes:
    """The data about an image that is kept while the network processes its planes."""

    size: Size  # of the output
    plane_count: int  # number of planes in the network
    color_planes: tuple[Image.Image, ...]  # colour planes, not enlarged yet
    alpha: Image.Image | None  # not enlarged yet
    tiling: Tiling


class PlanePipeline:
    def __init__(self, network: ImageNetwork) -> None:
        self.network = network

    def cut(self, image: Image.Image) -> tuple[list[Piece], _WaitingPlanes]:
        size = (image.width * self.network.scale, image.height * self.network.scale)
        alpha = image.getchannel("A") if image.mode in ("LA", "RGBA") else None
        planes = _split_planes(image)
        count = len(planes) if self.network.is_for_colors else 1
        tiling = divide_image(size, self.network.tile - 2 * self.network.overlap)
        tiles = [
            each for plane in planes[:count] for each in self._cut_tiles(enlarge(plane, self.network.scale), tiling)
        ]
        pieces = [Piece({self.network.input: each}, key=(self.network.input, *each.shape)) for each in tiles]
        return pieces, _WaitingPlanes(size, count, planes[count:], alpha, tiling)

    def bands(self, state: _WaitingPlanes, answers: Sequence[Sequence[Array]], colors: str) -> Iterator[Rows]:
        # Drop each tile's margin, which is wrong because convolutions use zeros beyond the tile's border.
        margin, tiling = self.network.overlap, state.tiling
        inner = np.s_[margin : margin + tiling.height, margin : margin + tiling.width]
        found = [answer[0][inner] for answer in answers]
        each = len(tiling.corners)
        laid = [tiling.join_bands(found[start : start + each]) for start in range(0, len(found), each)]
        for bands in zip(*laid, strict=True):
            yield _compose_band(state, bands[0][0], [band for _, band in bands], colors)

    def blank(self) -> Piece:
        return Piece({self.network.input: np.zeros((self.network.tile, self.network.tile), np.uint8)})

    def _cut_tiles(self, plane: Pixels, tiling: Tiling) -> Iterator[Pixels]:
        # Repeat the image's border outward, because the network was trained on pictures without frames.
        margin = self.network.overlap
        padded = np.pad(plane, margin, mode="edge")
        for top, left in tiling.corners:
            yield padded[top : top + tiling.height + 2 * margin, left : left + tiling.width + 2 * margin]


def _split_planes(image: Image.Image) -> tuple[Image.Image, ...]:
    if image.mode in ("L", "LA"):
        return (image.getchannel("L"),)
    return (image if image.mode == "RGB" else image.convert("RGB")).convert("YCbCr").split()


def _compose_band(state: _WaitingPlanes, top: int, planes: Sequence[Pixels], colors: str) -> Rows:
    """Return a band (some rows) of the answer: the network's planes, merged with the enlarged other planes."""
    width, rows = state.size[0], len(planes[0])

    def enlarge_band(plane: Image.Image) -> Pixels:
        scale = state.size[1] // plane.height
        first, last = max(0, top // scale - REACH), min(plane.height, -(-(top + rows) // scale) + REACH)
        strip = enlarge(plane.crop((0, first, plane.width, last)), scale)
        return strip[top - first * scale :][:rows]

    merged = [Image.fromarray(plane) for plane in (*planes, *map(enlarge_band, state.color_planes))]
    image = merged[0]
    if len(merged) > 1:
        image = Image.merge("YCbCr", merged)
        if colors != image.mode:
            image = image.convert("RGB")
    if state.alpha:
        image.putalpha(Image.fromarray(enlarge_band(state.alpha)))
    return np.asarray(image).reshape(rows, width, -1)
