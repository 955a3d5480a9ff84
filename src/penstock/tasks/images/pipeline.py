"""The protocol of the two pipelines that convert an image for a network, and its output to an image."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from penstock.core.tensors import Array
from penstock.tasks.base import Piece
from penstock.tasks.images.png import Rows


@dataclass(frozen=True, slots=True)
class ImageNetwork:
    input: str  # name of the network's input
    scale: int  # factor between the sides of the output and of the image
    overlap: int  # pixels of output around a tile that influence the tile's pixels
    tile: int  # pixels of output along a tile's side
    is_for_colors: bool  # False: the network takes luminance only, and colours are interpolated


class ImagePipeline(Protocol):
    """Converts an image to pieces for an image network, and the network's outputs to rows of pixels."""

    network: ImageNetwork

    def cut(self, image: Image.Image) -> tuple[list[Piece], Any]:
        """Return the pieces of an image (of mode L, LA, RGB or RGBA), and the state to pass to `bands`."""
        ...

    def bands(self, state: Any, answers: Sequence[Sequence[Array]], colors: str) -> Iterator[Rows]:
        """Yield the rows of the answer from top to bottom. `colors`: RGB or YCbCr; gray images stay gray."""
        ...

    def blank(self) -> Piece: ...
