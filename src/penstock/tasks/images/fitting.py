"""Images as a classifier's network takes them: decoded, fitted, and scaled as it was trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from penstock.core.errors import ConfigError
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, TensorSpec
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature
from penstock.tasks.images.files import IMAGE, count_request_pixels, decode_all, read_headers, take_files
from penstock.tasks.network import CHANNELS, PIXELS
from penstock.tasks.options import ClassifyOptions

DECODED_BYTES = 12  # a pixel, while it is decoded, turned and converted


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the network's input looks like."""

    width: int
    height: int
    is_channels_last: bool


class ImageInput:
    is_prepare_cheap = False

    def __init__(self, options: ClassifyOptions, engine: Signature, max_rows: int, is_batched: bool) -> None:
        spec = _check_input(engine)
        self.signature = TaskSignature((TensorSpec(IMAGE, BYTES, (-1, 1)),), (), max_rows)
        self._name = spec.name
        self._options = options
        self._frame = _frame(spec, options)
        self._dtype = NUMPY_TYPES[spec.datatype]
        self._is_batched = is_batched and spec.shape[0] == -1
        if spec.shape[0] > 1:
            raise ConfigError(
                f"'{spec.name}' takes {spec.shape[0]} images at a time and no fewer; "
                "export the model with an open batch dimension, or one of 1"
            )
        self._scale, self._shift = _normalization(options, self._frame.is_channels_last)

    def prepare(self, request: TaskRequest) -> Prepared:
        headers = read_headers(
            take_files(request, self.signature.max_batch_size), self._options.max_pixels, self._options.max_scans
        )
        pixels = (self._lay_out(self._fit(decoded.image)) for decoded in decode_all(headers, request))
        return Prepared([Piece({self._name: array}, key=IMAGE if self._is_batched else object()) for array in pixels])

    def weigh(self, request: TaskRequest) -> int:
        """One image is decoded at a time, and then no larger than the network takes it."""
        pixels = count_request_pixels(request, self.signature.max_batch_size)
        frame = self._frame.width * self._frame.height
        return DECODED_BYTES * min(max(pixels, default=0), self._options.max_pixels) + 3 * frame * len(pixels)

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        stacked = np.stack([piece.arrays[self._name] for piece in pieces])
        if self._dtype == np.uint8:
            return {self._name: stacked}
        # Only here do pixels become floats: those that wait for a batch take a quarter of the memory.
        scaled = np.multiply(stacked, self._scale, dtype=np.float32)
        scaled += self._shift
        return {self._name: scaled.astype(self._dtype, copy=False)}

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        blank = Image.new("L", (self._frame.width, self._frame.height))
        piece = Piece({self._name: self._lay_out(blank)})
        sizes = (1, self.signature.max_batch_size) if self._is_batched else (1,)
        return [self.join([piece] * rows) for rows in sizes]

    def _fit(self, image: Image.Image) -> Image.Image:
        """Brings an image to the frame's size. Where the proportions are others, `fit` says what becomes of them."""
        plain = image.convert("L" if self._options.colors == "gray" else "RGB")
        size = (self._frame.width, self._frame.height)
        if plain.size == size:
            return plain
        if self._options.fit == "stretch":
            return plain.resize(size, Image.Resampling.BILINEAR)
        if self._options.fit == "crop":  # the middle of what covers the frame
            return ImageOps.fit(plain, size, Image.Resampling.BILINEAR)
        return _pad(plain, size, min(want / got for want, got in zip(size, plain.size, strict=True)))

    def _lay_out(self, image: Image.Image) -> Array:
        if self._options.colors == "gray":
            pixels = np.asarray(image)[:, :, np.newaxis]
        else:
            pixels = np.asarray(image.convert("RGB"))
        if self._options.colors == "bgr":
            pixels = pixels[:, :, ::-1]
        return np.ascontiguousarray(pixels if self._frame.is_channels_last else pixels.transpose(2, 0, 1))


def _pad(image: Image.Image, size: tuple[int, int], ratio: float) -> Image.Image:
    """All of it in the middle of the frame, with black around."""
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


def _frame(spec: TensorSpec, options: ClassifyOptions) -> _Frame:
    channels = CHANNELS[options.colors]
    if spec.shape[1] == channels:
        is_channels_last = False
    elif spec.shape[3] == channels:
        is_channels_last = True
    else:
        raise ConfigError(
            f"classify.colors: {options.colors} needs {channels} channels, but '{spec.name}' is {list(spec.shape)}; "
            "set colors: gray for 1 channel, rgb or bgr for 3; or input: tensor where they are no images"
        )
    height, width = spec.shape[1:3] if is_channels_last else spec.shape[2:]
    sides = [size if size > 0 else options.size for size in (width, height)]
    if None in sides:
        raise ConfigError(
            f"classify.size: '{spec.name}' is {list(spec.shape)} and leaves it open; set the pixels of a side"
        )
    if options.size is not None and sides != [options.size] * 2:
        raise ConfigError(
            f"classify.size: {options.size} is not what '{spec.name}' {list(spec.shape)} takes; remove it"
        )
    return _Frame(int(sides[0] or 0), int(sides[1] or 0), is_channels_last)


def _normalization(options: ClassifyOptions, is_channels_last: bool) -> tuple[Array, Array]:
    """(scale, shift) of eight-bit values, in the shape of one image."""
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
