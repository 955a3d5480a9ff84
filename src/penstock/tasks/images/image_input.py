"""The image input of a classifier: decodes, resizes and normalizes images as when the network was trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from penstock.core.errors import ConfigError
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, TensorSpec
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.images.image_files import IMAGE, count_request_pixels, decode_all, read_headers, take_files
from penstock.tasks.network import CHANNELS, PIXELS
from penstock.tasks.options import ClassifyOptions

DECODED_BYTES = 12  # memory per pixel while an image is decoded, rotated and converted


@dataclass(frozen=True, slots=True)
class _InputLayout:
    """The layout of the network's input."""

    width: int
    height: int
    is_channels_last: bool


class ImageInput:
    """Converts image files to the network's input."""

    is_prepare_cheap = False

    def __init__(self, options: ClassifyOptions, engine: Signature, max_rows: int, is_batched: bool) -> None:
        spec = _check_input(engine)
        self.signature = TaskSignature((TensorSpec(IMAGE, BYTES, (-1, 1)),), (), max_rows)
        self._name = spec.name
        self._options = options
        self._frame = _read_layout(spec, options)
        self._dtype = NUMPY_TYPES[spec.datatype]
        self._is_batched = is_batched and spec.shape[0] == -1
        if spec.shape[0] > 1:
            raise ConfigError(
                f"input '{spec.name}' has a fixed batch size of {spec.shape[0]}; "
                "export the model with a dynamic batch dimension, or with a batch size of 1"
            )
        self._scale, self._shift = _make_normalization(options, self._frame.is_channels_last)

    def prepare(self, request: TaskRequest) -> Prepared:
        headers = read_headers(take_files(request, self.signature.max_batch_size), self._options.max_pixels)
        pixels = (self._to_input_layout(self._resize(decoded.image)) for decoded in decode_all(headers, request))
        return Prepared([Piece({self._name: array}, key=IMAGE if self._is_batched else object()) for array in pixels])

    def weigh(self, request: TaskRequest) -> int:
        """Return the memory of the largest decoded image, plus that of all images at the network's input size."""
        pixels = count_request_pixels(request, self.signature.max_batch_size)
        frame = self._frame.width * self._frame.height
        return DECODED_BYTES * min(max(pixels, default=0), self._options.max_pixels) + 3 * frame * len(pixels)

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        stacked = np.stack([piece.arrays[self._name] for piece in pieces])
        if self._dtype == np.uint8:
            return {self._name: stacked}
        # Pixels are converted to floats here, because waiting pieces of bytes need only a quarter of the memory.
        scaled = np.multiply(stacked, self._scale, dtype=np.float32)
        scaled += self._shift
        return {self._name: scaled.astype(self._dtype, copy=False)}

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        blank = Image.new("L", (self._frame.width, self._frame.height))
        piece = Piece({self._name: self._to_input_layout(blank)})
        sizes = (1, self.signature.max_batch_size) if self._is_batched else (1,)
        return [self.join([piece] * rows) for rows in sizes]

    def _resize(self, image: Image.Image) -> Image.Image:
        """Resize an image to the size of the network's input: cropped, stretched or padded, as `fit` says."""
        plain = image.convert("L" if self._options.colors == "gray" else "RGB")
        size = (self._frame.width, self._frame.height)
        if plain.size == size:
            return plain
        if self._options.fit == "stretch":
            return plain.resize(size, Image.Resampling.BILINEAR)
        if self._options.fit == "crop":  # cover the frame, keep the middle
            return ImageOps.fit(plain, size, Image.Resampling.BILINEAR)
        return _resize_and_pad(plain, size, min(want / got for want, got in zip(size, plain.size, strict=True)))

    def _to_input_layout(self, image: Image.Image) -> Array:
        if self._options.colors == "gray":
            pixels = np.asarray(image)[:, :, np.newaxis]
        else:
            pixels = np.asarray(image.convert("RGB"))
        if self._options.colors == "bgr":
            pixels = pixels[:, :, ::-1]
        return np.ascontiguousarray(pixels if self._frame.is_channels_last else pixels.transpose(2, 0, 1))


def _resize_and_pad(image: Image.Image, size: tuple[int, int], ratio: float) -> Image.Image:
    """Resize the image by `ratio`, and centre it in a black frame."""
    width, height = (max(1, min(want, round(got * ratio))) for want, got in zip(size, image.size, strict=True))
    framed = Image.new(image.mode, size)
    framed.paste(
        image.resize((width, height), Image.Resampling.BILINEAR), ((size[0] - width) // 2, (size[1] - height) // 2)
    )
    return framed


def _check_input(engine: Signature) -> TensorSpec:
    if len(engine.inputs) != 1:
        names = ", ".join(spec.name for spec in engine.inputs)
        raise ConfigError(
            f"classify.input: image needs a network of one input; got {names}: set input: tensor",
            reason="task_mismatch",
        )
    (spec,) = engine.inputs
    if spec.datatype not in PIXELS or len(spec.shape) != 4:
        raise ConfigError(
            f"classify.input: image needs '{spec.name}' to be {', '.join(PIXELS)} [batch, channels, height, width] "
            f"or [batch, height, width, channels]; got {spec.datatype} {list(spec.shape)}: set input: tensor"
        )
    return spec


def _read_layout(spec: TensorSpec, options: ClassifyOptions) -> _InputLayout:
    channels = CHANNELS[options.colors]
    if spec.shape[1] == channels:
        is_channels_last = False
    elif spec.shape[3] == channels:
        is_channels_last = True
    else:
        raise ConfigError(
            f"classify.colors: {options.colors} needs {channels} channels, but '{spec.name}' is {list(spec.shape)}; "
            "set colors: gray for 1 channel, rgb or bgr for 3; or input: tensor if they are not images"
        )
    height, width = spec.shape[1:3] if is_channels_last else spec.shape[2:]
    sides = [size if size > 0 else options.size for size in (width, height)]
    if None in sides:
        raise ConfigError(
            f"classify.size: input '{spec.name}' {list(spec.shape)} has a dynamic height or width; "
            "set classify.size to the pixels of a side"
        )
    if options.size is not None and sides != [options.size] * 2:
        raise ConfigError(
            f"classify.size: {options.size} does not fit input '{spec.name}' {list(spec.shape)}; remove classify.size"
        )
    return _InputLayout(int(sides[0] or 0), int(sides[1] or 0), is_channels_last)


def _make_normalization(options: ClassifyOptions, is_channels_last: bool) -> tuple[Array, Array]:
    """Return the scale and shift that normalize eight-bit values, in a shape that fits one image."""
    channels = CHANNELS[options.colors]
    for setting, given in (("mean", options.mean), ("std", options.std)):
        if len(given) not in (1, channels):
            raise ConfigError(
                f"classify.{setting}: {len(given)} values for {channels} channel(s) ({options.colors}); "
                f"give 1 or {channels}"
            )
    mean, std = (np.broadcast_to(np.array(given), channels) for given in (options.mean, options.std))
    shape = (1, 1, channels) if is_channels_last else (channels, 1, 1)
    return (1 / (255 * std)).astype(np.float32).reshape(shape), (-mean / std).astype(np.float32).reshape(shape)
