"""The pipeline for networks of pixels (UINT8), which themselves enlarge and sharpen images, and convert them to RGB."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from penstock.core.tensors import Array
from penstock.tasks.base import Piece
from penstock.tasks.images.pipeline import ImageNetwork
from penstock.tasks.images.png import Rows
from penstock.tasks.images.tiling import Pixels, Tiling, divide_image

REACH = 3  # pixels of the image within reach of bicubic interpolation, plus one


@dataclass(frozen=True, slots=True)
class _TileWindow:
    """The part of the image that a tile contains: the tile's area, and a margin around it that ends at the border."""

    top: int
    left: int
    bottom: int
    right: int


class PixelPipeline:
    """Cuts images into tiles of pixels (YCbCr or gray, and alpha) for a network that returns RGB or gray."""

    def __init__(self, network: ImageNetwork) -> None:
        self.network = network
        self._margin = -(-network.overlap // network.scale) + REACH

    def cut(self, image: Image.Image) -> tuple[list[Piece], Tiling]:
        pixels = _to_pixels(image)
        tiling = self._plan_tiles(image.size)
        windows = (self._find_window(tiling, corner) for corner in tiling.corners)
        tiles = [pixels[each.top : each.bottom, each.left : each.right] for each in windows]
        return [Piece({self.network.input: each}, key=(self.network.input, *each.shape)) for each in tiles], tiling

    def bands(self, state: Tiling, answers: Sequence[Sequence[Array]], colors: str) -> Iterator[Rows]:
        assert colors == "RGB", "the network converts to RGB"
        scale, width, height = (
            self.network.scale,
            state.width * self.network.scale,
            state.height * self.network.scale,
        )
        found: list[Pixels] = []
        for (top, left), answer in zip(state.corners, answers, strict=True):
            window = self._find_window(state, (top, left))
            first, beside = (top - window.top) * scale, (left - window.left) * scale
            found.append(answer[0][first : first + height, beside : beside + width])
        larger = Tiling(
            (state.size[0] * scale, state.size[1] * scale),
            width,
            height,
            tuple((top * scale, left * scale) for top, left in state.corners),
        )
        for _, band in larger.join_bands(found):
            yield band

    def blank(self) -> Piece:
        side = self.network.tile // self.network.scale
        return Piece({self.network.input: np.zeros((min(side, 540), min(side, 960), 3), np.uint8)})

    def _plan_tiles(self, size: tuple[int, int]) -> Tiling:
        side = self.network.tile // self.network.scale
        whole = divide_image(size, side)
        return whole if len(whole.corners) == 1 else divide_image(size, max(1, side - 2 * self._margin))

    def _find_window(self, tiling: Tiling, corner: tuple[int, int]) -> _TileWindow:
        (top, left), margin, (width, height) = corner, self._margin, tiling.size
        return _TileWindow(
            max(0, top - margin),
            max(0, left - margin),
            min(height, top + tiling.height + margin),
            min(width, left + tiling.width + margin),
        )


def _to_pixels(image: Image.Image) -> Pixels:
    if image.mode in ("L", "LA"):
        return np.asarray(image).reshape(image.height, image.width, -1)
    pixels = np.asarray((image if image.mode == "RGB" else image.convert("RGB")).convert("YCbCr"))
    return np.dstack([pixels, np.asarray(image.getchannel("A"))]) if image.mode == "RGBA" else pixels
