"""Converts a network of image planes to one of whole pixels, so that all work on an image runs on the GPU.

Eight-bit images are copied to and from the device. Bicubic interpolation, the network, rounding and the conversion of
colours run on the device. Their results differ from Pillow's by at most one step.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from penstock.core.signature import ImageWork
from penstock.core.tensors import TensorSpec
from penstock.engines.torch.torch_model import TORCH_TYPES, TorchModel, select_outputs

OPEN = (-1, -1, -1, -1)  # batch, height, width, channels
GRAIN = 32  # pixels; sizes are rounded up to a multiple of it, so that networks get few different shapes
TOGETHER_PIXELS = 1 << 20  # most pixels in one run of the network; more would not be faster on a GPU
TUNED_AFTER = 8  # images of a shape, because trying all of cuDNN's algorithms takes a second
SHAPES = 1024  # most shapes that are counted, and most lengths whose weights are kept
PRECISION, SUPPORT = 22, 2  # of Pillow's bicubic interpolation: bits, and pixels to either side
PIXEL_BYTES = 1024  # memory per output pixel during convolutions
BATCHES_AT_ONCE = 4  # batches that share a GPU's memory, by default
TILE_SIDES = (512, 4096)
Pixels = NDArray[np.uint8]


def takes_planes(model: TorchModel) -> bool:
    specs = (*model.inputs, *model.outputs)
    return len(specs) == 2 and all(len(spec.shape) == 4 and spec.shape[1] == 1 for spec in specs)


def convert_to_pixels(model: TorchModel, work: ImageWork, device: Any) -> TorchModel:
    """Return a model that takes and returns pixels [batch, height, width, channels], and converts YCbCr to RGB."""
    given, answer = (TensorSpec(spec.name, "UINT8", OPEN) for spec in (model.inputs[0], model.outputs[0]))
    model.module.to(memory_format=torch.channels_last)
    pixels = _PixelNetwork(model, work, device)
    return replace(model, inputs=(given,), outputs=(answer,), forward=pixels.forward)


def choose_tile(device: Any) -> int:
    """Return a tile's side in pixels, such that all batches together fit into half of the GPU's free memory."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    side = math.isqrt(free_bytes // (2 * BATCHES_AT_ONCE * PIXEL_BYTES)) // GRAIN * GRAIN
    return max(TILE_SIDES[0], min(TILE_SIDES[1], side))


class _PixelNetwork:
    def __init__(self, model: TorchModel, work: ImageWork, device: Any) -> None:
        self._model = model
        self._work = work
        self._bicubic = _Bicubic(work.scale, device)
        self._colors = _Colors(device)
        self._dtype = TORCH_TYPES[model.inputs[0].datatype]
        self._image_counts: Counter[tuple[int, ...]] = (
            Counter()
        )  # number of images per shape; threads may lose a count, which does not matter

    def forward(self, tensors: Sequence[Any]) -> Any:
        planes = self._bicubic.enlarge(tensors[0].permute(0, 3, 1, 2).contiguous().int()).float()
        count = min(3, planes.shape[1]) if self._work.is_for_colors and planes.shape[1] > 2 else 1
        batch, _, height, width = planes.shape
        sharp = self._sharpen(planes[:, :count].reshape(batch * count, 1, height, width))
        layers = [*sharp.reshape(batch, count, height, width).unbind(1), *planes[:, count:].unbind(1)]
        colors = [self._colors.to_rgb(layers[:3])] if len(layers) > 2 else []
        parts = colors + [layer.unsqueeze(3) for layer in layers[3 * len(colors) :]]
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        return _copy_to_host(pixels.to(torch.uint8).contiguous())

    def _sharpen(self, planes: Any) -> Any:
        """Run planes through the network, padded to multiples of GRAIN by repeating their border pixels."""
        margin, (height, width) = self._work.overlap, planes.shape[2:]
        below, beside = (-(side + 2 * margin) % GRAIN for side in (height, width))
        padded = functional.pad(planes, (margin, margin + beside, margin, margin + below), mode="replicate")
        together = max(1, TOGETHER_PIXELS // (padded.shape[2] * padded.shape[3]))
        sharp = torch.cat([self._run_network(part) for part in padded.split(together)])
        inner = sharp[:, :, margin : margin + height, margin : margin + width]
        return inner.float().mul(255).round().clamp(0, 255)

    def _run_network(self, planes: Any) -> Any:
        if planes.is_cuda:
            self._tune_cudnn(tuple(planes.shape))
        (found,) = select_outputs(
            self._model.forward([_to_channels_last((planes / 255).to(self._dtype))]), self._model.outputs
        )
        return found

    def _tune_cudnn(self, shape: tuple[int, ...]) -> None:
        """Enable cuDNN's search for the fastest algorithm if the shape is frequent.

        This switch affects the whole process, but does not slow other threads.
        """
        if len(self._image_counts) > SHAPES:
            self._image_counts.clear()
        self._image_counts[shape] += 1
        torch.backends.cudnn.benchmark = self._image_counts[shape] > TUNED_AFTER


def _copy_to_host(pixels: Any) -> Any:
    """Copy pixels to pinned host memory, which is several times as fast as ordinary memory.

    The thread waits for a CUDA event, because it would not sleep while it waits for a stream.
    """
    if not pixels.is_cuda:
        return pixels
    found = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    found.copy_(pixels, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record()
    copied.synchronize()
    return found


def _to_channels_last(planes: Any) -> Any:
    """Return planes of one channel with the strides of the channels-last format, which convolutions recognize."""
    height, width = planes.shape[2:]
    return planes.contiguous().as_strided(planes.shape, (height * width, 1, width, 1))


class _Bicubic:
    """Enlarges planes like Pillow's bicubic interpolation: in integers, along rows, then columns, rounding twice."""

    def __init__(self, scale: int, device: Any) -> None:
        self._scale = scale
        self._device = device
        self._weights: dict[int, Any] = {}  # by the number of pixels along a side

    def enlarge(self, planes: Any) -> Any:
        return self._interpolate(self._interpolate(planes, 3), 2) if self._scale > 1 else planes

    def _interpolate(self, planes: Any, axis: int) -> Any:
        """Interpolate along an axis, with one pass per neighbouring pixel."""
        length = planes.shape[axis]
        weights = self._find_weights(length)
        padded = functional.pad(planes, (SUPPORT, SUPPORT) if axis == 3 else (0, 0, SUPPORT, SUPPORT))
        sums = torch.full((), 1 << (PRECISION - 1), dtype=torch.int32, device=planes.device)
        for offset in range(len(weights)):
            weighed = weights[offset] if axis == 3 else weights[offset][..., None]
            sums = torch.addcmul(sums, padded.narrow(axis, offset, length).unsqueeze(axis + 1), weighed)
        return sums.bitwise_right_shift_(PRECISION).clamp_(0, 255).flatten(axis, axis + 1)

    def _find_weights(self, length: int) -> Any:
        found = self._weights.get(length)
        if found is None:
            if len(self._weights) >= SHAPES:
                self._weights.clear()
            found = self._weights[length] = torch.from_numpy(_bicubic_weights(length, self._scale)).to(self._device)
        return found


def _bicubic_weights(length: int, scale: int) -> NDArray[np.int32]:
    """Return the weights [neighbours, length, scale] of each new pixel's neighbours."""
    middle = (np.arange(length * scale) + 0.5) / scale
    first = np.maximum(0, (middle - SUPPORT + 0.5).astype(np.int64))
    last = np.minimum(length, (middle + SUPPORT + 0.5).astype(np.int64))
    neighbours = np.arange(length).repeat(scale)[:, None] + np.arange(-SUPPORT, SUPPORT + 1)
    is_near = (neighbours >= first[:, None]) & (neighbours < last[:, None])
    weights = np.where(is_near, _cubic_kernel(neighbours - middle[:, None] + 0.5), 0.0)
    weights = weights / weights.sum(1, keepdims=True) * (1 << PRECISION)
    whole = np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32)
    return np.ascontiguousarray(whole.T).reshape(-1, length, scale)


def _cubic_kernel(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of Keys' bicubic kernel with a = -0.5, which Pillow uses."""
    far = np.abs(distance)
    near = (1.5 * far - 2.5) * far * far + 1
    return np.where(far < 1, near, np.where(far < SUPPORT, (((far - 5) * far + 8) * far - 4) * -0.5, 0.0))


class _Colors:
    """Converts YCbCr to RGB like Pillow, with tables of the values that Pillow adds to a pixel's luminance."""

    def __init__(self, device: Any) -> None:
        levels = np.arange(256, dtype=np.uint8)
        blue, red = np.meshgrid(levels, levels, indexing="ij")
        # Converting black shows the positive differences, and converting white the negative ones.
        black, white = (_ycbcr_to_rgb(np.full_like(blue, level), blue, red) for level in (0, 255))
        added = np.where(black > 0, black, white - 255).astype(np.float32)
        self._tables = torch.from_numpy(added).reshape(-1, 3).to(device)

    def to_rgb(self, layers: Sequence[Any]) -> Any:
        """Return [batch, height, width, 3] from three layers [batch, height, width]."""
        luminance, blue, red = layers
        return self._tables[blue.mul(256).add_(red).long()].add_(luminance.unsqueeze(3)).clamp_(0, 255)


def _ycbcr_to_rgb(luma: Pixels, cb: Pixels, cr: Pixels) -> NDArray[np.int16]:
    pixels = np.stack((luma, cb, cr), -1)
    image = Image.frombytes("YCbCr", (pixels.shape[1], pixels.shape[0]), pixels.tobytes())
    return np.asarray(image.convert("RGB")).astype(np.int16)
