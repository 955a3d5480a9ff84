"""The upscale task: images in, images larger or without noise out, by SRCNN and its like.

Images go through a network in tiles: an image's size does not decide a batch's memory, several instances can share
its tiles, and those of one shape can be batched. `mode: denoise` is for a model that has a second network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from penstock.core.errors import ConfigError, InvalidRequest, PenstockError, RequestTooLarge
from penstock.core.signature import SECOND, Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.columns import check_outputs
from penstock.tasks.images.decoding import ImageHeader
from penstock.tasks.images.encoding import write_file
from penstock.tasks.images.files import IMAGE, count_request_pixels, decode_all, read_headers, take_files
from penstock.tasks.images.network import ImageNetwork, ImageWay
from penstock.tasks.images.pixels import PixelWay
from penstock.tasks.images.planes import PlaneWay
from penstock.tasks.images.wishes import DENOISE, JPEG, PNG, UPSCALE, WEBP, ImageWishes, Size, read_wishes
from penstock.tasks.options import UpscaleOptions

PIXELS = ("UINT8", (-1, -1, -1, -1))  # of a network that does everything where it runs
PLANE = ("FP32", (-1, 1, -1, -1))
WHOLE_BYTES = 4  # a pixel, of an image that Pillow has as a whole
ANSWER_BYTES = {PNG: 7, JPEG: 2, WEBP: 8}  # a pixel, for its encoder and what that makes


@dataclass(frozen=True, slots=True)
class _Enlarged:
    """What of an image waits for its pieces to come back."""

    pieces: int
    waiting: Any  # its way's own
    sizes: tuple[Size, Size]  # of what its way makes, and of what was asked for
    color_profile: bytes | None


class UpscaleTask:
    is_prepare_cheap = False
    is_finish_cheap = False

    def __init__(self, options: UpscaleOptions, engine: Signature, max_rows: int) -> None:
        given, answer = _check_network(engine, is_second=False)
        self._options = options
        self._ways = {UPSCALE: _way(given, options.scale, options, engine.tile)}
        if any(each.name.startswith(SECOND) for each in engine.inputs):
            second, _ = _check_network(engine, is_second=True)
            self._ways[DENOISE] = _way(second, 1, options, engine.tile)
        self._modes = tuple(self._ways)
        self.engine_outputs: Sequence[str] = (answer.name,)  # a second network has one, too
        spec = TensorSpec(IMAGE, BYTES, (-1, 1))
        self.signature = TaskSignature((spec,), (spec,), max_rows)

    def prepare(self, request: TaskRequest) -> Prepared:
        given = take_files(request, self.signature.max_batch_size)
        check_outputs(request, (IMAGE,))
        wishes = read_wishes(request.parameters, self._modes)
        way = self._ways[wishes.mode]
        headers = read_headers(given, self._options.max_pixels, self._options.max_scans)
        self._check_sum(headers)
        sizes = self._plan(headers, wishes)
        pieces: list[Piece] = []
        enlarged: list[_Enlarged] = []
        for decoded, size in zip(decode_all(headers, request), sizes, strict=True):
            parts, waiting = way.cut(_fit_format(decoded.image, wishes))
            enlarged.append(_Enlarged(len(parts), waiting, size, decoded.color_profile))
            pieces += parts
            del decoded, parts
        return Prepared(pieces, (wishes, enlarged))

    def weigh(self, request: TaskRequest) -> int:
        """Its planes and the enlarged luminance three times; or, later, that twice and the answer's file twice.

        What is not written row by row is then there as a whole, too.
        """
        counts = count_request_pixels(request, self.signature.max_batch_size)
        pixels = min(sum(counts), self._options.max_pixels)
        try:
            wishes = read_wishes(request.parameters, self._modes)
        except PenstockError:
            return 0
        if not pixels:
            return 0
        network = self._ways[wishes.mode].network
        larger = pixels * max(network.scale**2, 3 if network.is_for_colors else 1)
        first, later = 8 * pixels + 3 * larger, 2 * pixels + 2 * larger
        if (wishes.format, wishes.resolution) == (PNG, None):
            return max(first, later + 6 * len(request.inputs[0].data))
        answer, each = larger, ANSWER_BYTES[wishes.format]
        if wishes.resolution is not None:
            answer, each = min(wishes.resolution.most_pixels(pixels), self._most_pixels), each + WHOLE_BYTES
        return max(first, later + WHOLE_BYTES * larger + each * answer)

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        ((name, first),) = pieces[0].arrays.items()
        tiles = first[np.newaxis] if len(pieces) == 1 else np.stack([piece.arrays[name] for piece in pieces])
        if first.ndim > 2:
            return {name: tiles}
        # Only here do tiles become floats: those that wait for a batch take a quarter of the memory.
        return {name: np.multiply(tiles[:, np.newaxis], np.float32(1 / 255), dtype=np.float32)}

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        answers = outputs[0]
        if answers.dtype == np.uint8:
            return [(answer,) for answer in answers]
        scaled = answers * np.float32(255)
        tiles = np.clip(np.rint(scaled, out=scaled), 0, 255, out=scaled).astype(np.uint8)
        return [(tiles[row, 0],) for row in range(len(pieces))]

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        wishes, enlarged = prepared.context
        way = self._ways[wishes.mode]
        colors = "YCbCr" if wishes.format == JPEG and isinstance(way, PlaneWay) else "RGB"
        parts: list[bytes] = []
        done = 0
        for each in enlarged:
            bands = way.bands(each.waiting, results[done : done + each.pieces], colors)
            done += each.pieces
            file = write_file(wishes, bands, each.sizes, each.color_profile, colors)
            parts += [sum(map(len, file)).to_bytes(4, "little"), *file]
        return [Tensor(IMAGE, BYTES, request.inputs[0].shape, b"".join(parts))]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return [self.join([self._ways[UPSCALE].blank()])]

    @property
    def _most_pixels(self) -> int:
        """Of an answer, whatever resolution is asked for: what the largest image becomes without asking."""
        return self._options.max_pixels * self._options.scale**2

    def _check_sum(self, headers: Sequence[ImageHeader]) -> None:
        pixels, limit = sum(header.pixels for header in headers), self._options.max_pixels
        if pixels > limit:
            raise RequestTooLarge(
                f"the {len(headers)} images have {pixels} pixels together; "
                f"this model takes at most {limit}: send fewer at a time"
            )

    def _plan(self, headers: Sequence[ImageHeader], wishes: ImageWishes) -> list[tuple[Size, Size]]:
        """The sizes that each image's way makes, and those asked for."""
        scale = self._ways[wishes.mode].network.scale
        found: list[tuple[Size, Size]] = []
        for header in headers:
            width, height = header.upright
            made = (width * scale, height * scale)
            wished = made if wishes.resolution is None else wishes.resolution.size((width, height))
            if wished[0] < width or wished[1] < height:
                raise InvalidRequest(
                    f"parameter 'resolution' would make an image of {width} × {height} pixels smaller "
                    f"({wished[0]} × {wished[1]}): ask for a larger one, or for 1x",
                    parameter="resolution",
                )
            wishes.check_size(wished)
            found.append((made, wished))
        pixels = sum(wished[0] * wished[1] for _, wished in found)
        if pixels > self._most_pixels:
            raise RequestTooLarge(
                f"the answer would have {pixels} pixels; this model gives at most {self._most_pixels}: "
                "ask for a smaller resolution, or send fewer at a time"
            )
        return found


def _fit_format(image: Image.Image, wishes: ImageWishes) -> Image.Image:
    if wishes.format != JPEG or image.mode not in ("LA", "RGBA"):
        return image
    if image.getchannel("A").getextrema() != (255, 255):
        raise InvalidRequest(
            "the image is transparent in places, and a jpeg file cannot be: ask for format png or webp",
            parameter="format",
        )
    return image.convert(image.mode[:-1])


def _way(given: TensorSpec, scale: int, options: UpscaleOptions, tile: int) -> ImageWay:
    is_second = given.name.startswith(SECOND)
    network = ImageNetwork(given.name, scale, options.overlap, tile or options.tile, is_for_colors=is_second)
    return PixelWay(network) if given.datatype == PIXELS[0] else PlaneWay(network)


def _check_network(engine: Signature, is_second: bool) -> tuple[TensorSpec, TensorSpec]:
    """The network's input and output; raises ConfigError where it does not map planes to planes."""
    inputs, outputs = (
        [spec for spec in specs if spec.name.startswith(SECOND) == is_second]
        for specs in (engine.inputs, engine.outputs)
    )
    if len(inputs) != 1 or len(outputs) != 1:
        raise ConfigError(
            f"the upscale task needs a network of one input and one output; got {len(inputs)} and {len(outputs)}",
            reason="task_mismatch",
        )
    for spec in (inputs[0], outputs[0]):
        if (spec.datatype, tuple(spec.shape)) not in (PLANE, PIXELS):
            raise ConfigError(
                f"the upscale task needs '{spec.name}' to be FP32 [batch, 1, height, width], "
                f"height and width left open; got {spec.datatype} {list(spec.shape)}",
                reason="task_mismatch",
            )
    return inputs[0], outputs[0]
