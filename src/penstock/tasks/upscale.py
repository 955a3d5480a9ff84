"""The upscale task: images in, images larger by a whole factor out, by SRCNN.

As the paper does, bicubic interpolation enlarges everything and the network then sharpens the luminance;
colour and transparency stay bicubic. Luminance goes through the network in tiles: an image's size does not
decide a batch's memory, several instances can share its tiles, and those of one shape can be batched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from penstock.core.errors import ConfigError, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.columns import check_outputs
from penstock.tasks.image_files import IMAGE, count_request_pixels, decode_all, read_headers, take_files
from penstock.tasks.images import DecodedImage, ImageHeader
from penstock.tasks.options import UpscaleOptions
from penstock.tasks.png import Rows, encode_png

GRAIN = 16  # pixels
REACH = 3  # pixels above and below that bicubic interpolation looks at, and one
Plane = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Tiling:
    """What of an image each tile answers for: what lies `overlap` inside it.

    The zeros that convolutions see beyond a tile's border reach no further in than that.
    """

    width: int
    height: int
    corners: tuple[tuple[int, int], ...]  # top, left


@dataclass(frozen=True, slots=True)
class _Enlarged:
    """What of an image waits for its luminance to come back."""

    size: tuple[int, int]  # width, height
    color: tuple[Image.Image, ...]  # Cb and Cr, as small as they came; none where the image is gray
    alpha: Image.Image | None  # as small
    color_profile: bytes | None
    tiling: _Tiling


class UpscaleTask:
    is_prepare_cheap = False
    is_finish_cheap = False

    def __init__(self, options: UpscaleOptions, engine: Signature, max_rows: int) -> None:
        given, answer = _check_network(engine)
        self._options = options
        self._input = given.name
        self.engine_outputs: Sequence[str] = (answer.name,)
        spec = TensorSpec(IMAGE, BYTES, (-1, 1))
        self.signature = TaskSignature((spec,), (spec,), max_rows)

    def prepare(self, request: TaskRequest) -> Prepared:
        given = take_files(request, self.signature.max_batch_size)
        check_outputs(request, (IMAGE,))
        headers = read_headers(given, self._options.max_pixels, self._options.max_scans)
        self._check_sum(headers)
        pieces: list[Piece] = []
        enlarged: list[_Enlarged] = []
        for decoded in decode_all(headers, request):
            luminance, waiting = self._enlarge(decoded)
            del decoded
            enlarged.append(waiting)
            tiles = self._cut(luminance, waiting.tiling)
            pieces += [Piece({self._input: tile}, key=tile.shape) for tile in tiles]
        return Prepared(pieces, enlarged)

    def weigh(self, request: TaskRequest) -> int:
        """Its planes and the enlarged luminance three times; or, later, that twice and the answer's file twice."""
        counts = count_request_pixels(request, self.signature.max_batch_size)
        pixels = min(sum(counts), self._options.max_pixels)
        larger = pixels * self._options.scale**2
        return max(8 * pixels + 3 * larger, 2 * pixels + 2 * larger + 6 * len(request.inputs[0].data)) if pixels else 0

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        tiles = np.stack([piece.arrays[self._input] for piece in pieces])[:, np.newaxis]
        # Only here do tiles become floats: those that wait for a batch take a quarter of the memory.
        return {self._input: np.multiply(tiles, np.float32(1 / 255), dtype=np.float32)}

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        scaled = outputs[0] * np.float32(255)
        tiles = np.clip(np.rint(scaled, out=scaled), 0, 255, out=scaled).astype(np.uint8)
        return [(tiles[row, 0],) for row in range(len(pieces))]

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        parts: list[bytes] = []
        done = 0
        for enlarged in prepared.context:
            tiles = [result[0] for result in results[done : done + len(enlarged.tiling.corners)]]
            done += len(tiles)
            bands = (_compose(enlarged, top, band) for top, band in self._lay(tiles, enlarged))
            file = encode_png(enlarged.size, bands, enlarged.color_profile)
            parts += [sum(map(len, file)).to_bytes(4, "little"), *file]
        return [Tensor(IMAGE, BYTES, request.inputs[0].shape, b"".join(parts))]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        side = self._options.tile
        return [self.join([Piece({self._input: np.zeros((side, side), np.uint8)})])]

    def _check_sum(self, headers: Sequence[ImageHeader]) -> None:
        pixels, limit = sum(header.pixels for header in headers), self._options.max_pixels
        if pixels > limit:
            raise RequestTooLarge(
                f"the {len(headers)} images have {pixels} pixels together; "
                f"this model takes at most {limit}: send fewer at a time"
            )

    def _enlarge(self, decoded: DecodedImage) -> tuple[Plane, _Enlarged]:
        """Returns (the luminance to sharpen, what waits for it)."""
        image = decoded.image
        size = (image.width * self._options.scale, image.height * self._options.scale)
        alpha = image.getchannel("A") if image.mode in ("LA", "RGBA") else None
        if image.mode in ("L", "LA"):
            planes: tuple[Image.Image, ...] = (image.getchannel("L"),)
        else:
            planes = (image if image.mode == "RGB" else image.convert("RGB")).convert("YCbCr").split()
        waiting = _Enlarged(size, planes[1:], alpha, decoded.color_profile, self._tile(size))
        return np.asarray(planes[0].resize(size, Image.Resampling.BICUBIC)), waiting

    def _tile(self, size: tuple[int, int]) -> _Tiling:
        limit = self._options.tile - 2 * self._options.overlap
        (width, lefts), (height, tops) = (_divide(length, limit) for length in size)
        return _Tiling(width, height, tuple((top, left) for top in tops for left in lefts))

    def _cut(self, luminance: Plane, tiling: _Tiling) -> Iterator[Plane]:
        # The image's border is repeated outward: the network learnt on pictures that go on, not on frames.
        margin = self._options.overlap
        padded = np.pad(luminance, margin, mode="edge")
        for top, left in tiling.corners:
            yield padded[top : top + tiling.height + 2 * margin, left : left + tiling.width + 2 * margin]

    def _lay(self, tiles: Sequence[Plane], enlarged: _Enlarged) -> Iterator[tuple[int, Plane]]:
        """Yields (top, luminance) of a row of tiles; the last leaves out what the one before has of it."""
        tiling, margin = enlarged.tiling, self._options.overlap
        placed = zip(tiling.corners, tiles, strict=True)
        done = 0
        for top, row in groupby(placed, key=lambda each: each[0][0]):
            band = np.empty((tiling.height, enlarged.size[0]), np.uint8)
            for (_, left), tile in row:
                answer = tile[margin : margin + tiling.height, margin : margin + tiling.width]
                band[:, left : left + tiling.width] = answer
            yield done, band[done - top :]
            done = top + tiling.height


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


def _compose(enlarged: _Enlarged, top: int, luminance: Plane) -> Rows:
    """A band of the answer: its luminance, with colour and transparency as large."""

    def enlarge(plane: Image.Image) -> Image.Image:
        scale = enlarged.size[1] // plane.height
        first = max(0, top // scale - REACH)
        last = min(plane.height, -(-(top + len(luminance)) // scale) + REACH)
        strip = plane.crop((0, first, plane.width, last))
        strip = strip.resize((enlarged.size[0], strip.height * scale), Image.Resampling.BICUBIC)
        return strip.crop((0, top - first * scale, strip.width, top - first * scale + len(luminance)))

    image = Image.fromarray(luminance)
    if enlarged.color:
        image = Image.merge("YCbCr", (image, *map(enlarge, enlarged.color))).convert("RGB")
    if enlarged.alpha:
        image.putalpha(enlarge(enlarged.alpha))
    return np.asarray(image).reshape(len(luminance), enlarged.size[0], -1)


def _check_network(engine: Signature) -> tuple[TensorSpec, TensorSpec]:
    """The network's input and output; raises ConfigError where it does not map planes to planes."""
    if len(engine.inputs) != 1 or len(engine.outputs) != 1:
        raise ConfigError(
            f"the upscale task needs a network of one input and one output; "
            f"got {len(engine.inputs)} and {len(engine.outputs)}",
            reason="task_mismatch",
        )
    for spec in (engine.inputs[0], engine.outputs[0]):
        is_plane = len(spec.shape) == 4 and spec.shape[1] == 1 and spec.shape[2] == spec.shape[3] == -1
        if spec.datatype != "FP32" or not is_plane:
            raise ConfigError(
                f"the upscale task needs '{spec.name}' to be FP32 [batch, 1, height, width], "
                f"height and width left open; got {spec.datatype} {list(spec.shape)}",
                reason="task_mismatch",
            )
    return engine.inputs[0], engine.outputs[0]
