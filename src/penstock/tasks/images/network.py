"""What an image task's network is to it, and the two ways that an image goes through one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from penstock.core.tensors import Array
from penstock.tasks.base import Piece
from penstock.tasks.images.png import Rows


@dataclass(frozen=True, slots=True)
class ImageNetwork:
    input: str  # its name
    scale: int  # the factor of width and height by which its answer is larger than the image
    overlap: int  # pixels of the answer beyond which no pixel counts for another
    tile: int  # pixels of the answer along a tile's side
    is_for_colors: bool  # False: it is for the luminance alone, and colours are enlarged by interpolation


class ImageWay(Protocol):
    """From an image to a network's pieces, and from its answers to an image's rows."""

    network: ImageNetwork

    def cut(self, image: Image.Image) -> tuple[list[Piece], Any]:
        """Returns (the pieces, what waits for their answers). The image is L, LA, RGB or RGBA."""
        ...

    def bands(self, waiting: Any, answers: Sequence[Sequence[Array]], colors: str) -> Iterator[Rows]:
        """The answer from top to bottom, in RGB, or in YCbCr where that is asked for and `cut` made no other."""
        ...

    def blank(self) -> Piece:
        """To warm up with."""
        ...
