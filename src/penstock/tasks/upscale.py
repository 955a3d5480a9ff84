"""The upscale task: enlarges images or removes their noise, with networks such as SRCNN.

Images pass through the network in tiles, so that a batch's memory does not depend on the size of an image, several
instances can work on one image, and tiles of the same shape can be batched. `mode: denoise` needs a second network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from penstock.core.errors import ConfigError, InvalidRequest, PenstockError, RequestTooLarge
from penstock.core.signature import SECOND_PREFIX, Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.columns import check_outputs
from penstock.tasks.images.decoding import ImageHeader
from penstock.tasks.images.encoding import write_file
from penstock.tasks.images.image_files import IMAGE, count_request_pixels, decode_all, read_headers, take_files
from penstock.tasks.images.output_options import (
    DENOISE,
    JPEG,
    PNG,
    UPSCALE,
    WEBP,
    OutputOptions,
    Size,
    read_output_options,
)
from penstock.tasks.images.pipeline import ImageNetwork, ImagePipeline
from penstock.tasks.images.pixels import PixelPipeline
from penstock.tasks.images.planes import PlanePipeline
from penstock.tasks.options import UpscaleOptions

PIXELS = ("UINT8", (-1, -1, -1, -1))  # of a network that does all work on its device
PLANE = ("FP32", (-1, 1, -1, -1))
WHOLE_BYTES = 4  # per pixel of an image that Pillow holds as a whole
ANSWER_BYTES = {PNG: 7, JPEG: 2, WEBP: 8}  # per pixel, for the encoder and its output


@dataclass(frozen=True, slots=True)
class _ImageState:
    """The data about an image that is kept while the network processes its pieces."""

    pieces: int
    pipeline_state: Any  # state of the pipeline
    sizes: tuple[Size, Size]  # the size of the pipeline's output, and the requested size
    color_profile: bytes | None


class UpscaleTask:
    is_prepare_cheap = False
    is_finish_cheap = False

    def __init__(self, options: UpscaleOptions, engine: Signature, max_rows: int) -> None:
        given, answer = _check_network(engine, is_second=False)
        self._options = options
        self._pipelines = {UPSCALE: _make_pipeline(given, options.scale, options, engine.tile)}
        if any(each.name.startswith(SECOND_PREFIX) for each in engine.inputs):
            second, _ = _check_network(engine, is_second=True)
            self._pipelines[DENOISE] = _make_pipeline(second, 1, options, engine.tile)
        self._modes = tuple(self._pipelines)
        self.engine_outputs: Sequence[str] = (answer.name,)  # both networks use this name
        spec = TensorSpec(IMAGE, BYTES, (-1, 1))
        self.signature = TaskSignature((spec,), (spec,), max_rows)

    def prepare(self, request: TaskRequest) -> Prepared:
        given = take_files(request, self.signature.max_batch_size)
        check_outputs(request, (IMAGE,))
        output = read_output_options(request.parameters, self._modes)
        pipeline = self._pipelines[output.mode]
        headers = read_headers(given, self._options.max_pixels)
        self._check_total_pixels(headers)
        sizes = self._plan_sizes(headers, output)
        pieces: list[Piece] = []
        enlarged: list[_ImageState] = []
        for decoded, size in zip(decode_all(headers, request), sizes, strict=True):
            parts, waiting = pipeline.cut(_remove_alpha(decoded.image, output))
            enlarged.append(_ImageState(len(parts), waiting, size, decoded.color_profile))
            pieces += parts
            del decoded, parts
        return Prepared(pieces, (output, enlarged))

    def weigh(self, request: TaskRequest) -> int:
        """Return the memory that `prepare` or `finish` needs, whichever is larger.

        `prepare` needs the planes and three copies of the enlarged luminance; `finish` needs two copies, and the
        answer's file twice. An answer that is not written band by band is also in memory as a whole.
        """
        counts = count_request_pixels(request, self.signature.max_batch_size)
        pixels = min(sum(counts), self._options.max_pixels)
        try:
            output = read_output_options(request.parameters, self._modes)
        except PenstockError:
            return 0
        if not pixels:
            return 0
        network = self._pipelines[output.mode].network
        larger = pixels * max(network.scale**2, 3 if network.is_for_colors else 1)
        first, later = 8 * pixels + 3 * larger, 2 * pixels + 2 * larger
        if (output.format, output.resolution) == (PNG, None):
            return max(first, later + 6 * len(request.inputs[0].data))
        answer, each = larger, ANSWER_BYTES[output.format]
        if output.resolution is not None:
            answer, each = min(output.resolution.most_pixels(pixels), self._most_pixels), each + WHOLE_BYTES
        return max(first, later + WHOLE_BYTES * larger + each * answer)

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        ((name, first),) = pieces[0].arrays.items()
        tiles = first[np.newaxis] if len(pieces) == 1 else np.stack([piece.arrays[name] for piece in pieces])
        if first.ndim > 2:
            return {name: tiles}
        # Tiles are converted to floats here, because waiting pieces of bytes need only a quarter of the memory.
        return {name: np.multiply(tiles[:, np.newaxis], np.float32(1 / 255), dtype=np.float32)}

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        answers = outputs[0]
        if answers.dtype == np.uint8:
            return [(answer,) for answer in answers]
        scaled = answers * np.float32(255)
        tiles = np.clip(np.rint(scaled, out=scaled), 0, 255, out=scaled).astype(np.uint8)
        return [(tiles[row, 0],) for row in range(len(pieces))]

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        output, enlarged = prepared.context
        pipeline = self._pipelines[output.mode]
        colors = "YCbCr" if output.format == JPEG and isinstance(pipeline, PlanePipeline) else "RGB"
        parts: list[bytes] = []
        done = 0
        for each in enlarged:
            bands = pipeline.bands(each.pipeline_state, results[done : done + each.pieces], colors)
            done += each.pieces
            file = write_file(output, bands, each.sizes, each.color_profile, colors)
            parts += [sum(map(len, file)).to_bytes(4, "little"), *file]
        return [Tensor(IMAGE, BYTES, request.inputs[0].shape, b"".join(parts))]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return [self.join([self._pipelines[UPSCALE].blank()])]

    @property
    def _most_pixels(self) -> int:
        """Return the most pixels of an answer: the pixels of the largest input, enlarged by the default scale."""
        return self._options.max_pixels * self._options.scale**2

    def _check_total_pixels(self, headers: Sequence[ImageHeader]) -> None:
        pixels, limit = sum(header.pixels for header in headers), self._options.max_pixels
        if pixels > limit:
            raise RequestTooLarge(
                f"the {len(headers)} images together have {pixels} pixels; "
                f"this model takes at most {limit}: send fewer images per request"
            )

    def _plan_sizes(self, headers: Sequence[ImageHeader], output: OutputOptions) -> list[tuple[Size, Size]]:
        """Return the size of the pipeline's output and the requested size of each image."""
        scale = self._pipelines[output.mode].network.scale
        found: list[tuple[Size, Size]] = []
        for header in headers:
            width, height = header.upright
            made = (width * scale, height * scale)
            requested = made if output.resolution is None else output.resolution.size((width, height))
            if requested[0] < width or requested[1] < height:
                raise InvalidRequest(
                    f"parameter 'resolution' would make an image of {width} × {height} pixels smaller "
                    f"({requested[0]} × {requested[1]}): request a larger resolution, or 1x",
                    parameter="resolution",
                )
            output.check_size(requested)
            found.append((made, requested))
        pixels = sum(requested[0] * requested[1] for _, requested in found)
        if pixels > self._most_pixels:
            raise RequestTooLarge(
                f"the answer would have {pixels} pixels; this model gives at most {self._most_pixels}: "
                "request a smaller resolution, or send fewer images per request"
            )
        return found


def _remove_alpha(image: Image.Image, output: OutputOptions) -> Image.Image:
    if output.format != JPEG or image.mode not in ("LA", "RGBA"):
        return image
    if image.getchannel("A").getextrema() != (255, 255):
        raise InvalidRequest(
            "the image has transparent pixels, which jpeg cannot store: request format png or webp",
            parameter="format",
        )
    return image.convert(image.mode[:-1])


def _make_pipeline(input_spec: TensorSpec, scale: int, options: UpscaleOptions, tile: int) -> ImagePipeline:
    is_second = input_spec.name.startswith(SECOND_PREFIX)
    network = ImageNetwork(input_spec.name, scale, options.overlap, tile or options.tile, is_for_colors=is_second)
    return PixelPipeline(network) if input_spec.datatype == PIXELS[0] else PlanePipeline(network)


def _check_network(engine: Signature, is_second: bool) -> tuple[TensorSpec, TensorSpec]:
    """Return the network's input and output; raise ConfigError if the task does not support them."""
    inputs, outputs = (
        [spec for spec in specs if spec.name.startswith(SECOND_PREFIX) == is_second]
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
                f"with dynamic height and width; got {spec.datatype} {list(spec.shape)}",
                reason="task_mismatch",
            )
    return inputs[0], outputs[0]
