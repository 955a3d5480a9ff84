"""A network of planes made one of pixels: what the CPU would do before and after it is done where it runs.

Eight-bit images go to the device as small as they came and come back as large as they leave: bicubic interpolation,
the network, rounding and colours are there, and agree with Pillow's within one step.
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

from penstock.core.tensors import TensorSpec
from penstock.engines.base import ImageWork
from penstock.engines.torch.model import TORCH_TYPES, TorchModel, pick

OPEN = (-1, -1, -1, -1)  # batch, height, width, channels
GRAIN = 32  # pixels: networks see few shapes, whatever the images' sizes
TOGETHER_PIXELS = 1 << 20  # through the network: more keep a GPU no busier, and would be shapes to tune for
TUNED_AFTER = 8  # images of a shape: trying all of cuDNN's algorithms takes a second
SHAPES = 1024  # of which something is remembered
PRECISION, SUPPORT = 22, 2  # of Pillow's bicubic interpolation: bits, and pixels to either side
PIXEL_BYTES = 1024  # what a pixel of the answer takes while convolutions are under way
AT_ONCE = 4  # batches on a GPU, where model.yaml does not say otherwise
TILE_SIDES = (512, 4096)
Pixels = NDArray[np.uint8]


def takes_planes(model: TorchModel) -> bool:
    specs = (*model.inputs, *model.outputs)
    return len(specs) == 2 and all(len(spec.shape) == 4 and spec.shape[1] == 1 for spec in specs)


def on_pixels(model: TorchModel, work: ImageWork, device: Any) -> TorchModel:
    """The same network: [batch, height, width, channels] of YCbCr or gray, and transparency, to RGB or gray."""
    given, answer = (TensorSpec(spec.name, "UINT8", OPEN) for spec in (model.inputs[0], model.outputs[0]))
    model.module.to(memory_format=torch.channels_last)
    pixels = _PixelNetwork(model, work, device)
    return replace(model, inputs=(given,), outputs=(answer,), call=pixels.call)


def choose_tile(device: Any) -> int:
    """Pixels along the side of what the GPU's free memory holds for each batch, with as much left over."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    side = math.isqrt(free_bytes // (2 * AT_ONCE * PIXEL_BYTES)) // GRAIN * GRAIN
    return max(TILE_SIDES[0], min(TILE_SIDES[1], side))


class _PixelNetwork:
    def __init__(self, model: TorchModel, work: ImageWork, device: Any) -> None:
        self._model = model
        self._work = work
        self._bicubic = _Bicubic(work.scale, device)
        self._colors = _Colors(device)
        self._dtype = TORCH_TYPES[model.inputs[0].datatype]
        self._seen: Counter[tuple[int, ...]] = Counter()  # shapes; what threads lose of it does not matter

    def call(self, tensors: Sequence[Any]) -> Any:
        planes = self._bicubic.enlarge(tensors[0].permute(0, 3, 1, 2).contiguous().int()).float()
        count = min(3, planes.shape[1]) if self._work.is_for_colors and planes.shape[1] > 2 else 1
        batch, _, height, width = planes.shape
        sharp = self._sharpen(planes[:, :count].reshape(batch * count, 1, height, width))
        layers = [*sharp.reshape(batch, count, height, width).unbind(1), *planes[:, count:].unbind(1)]
        colors = [self._colors.to_rgb(layers[:3])] if len(layers) > 2 else []
        parts = colors + [layer.unsqueeze(3) for layer in layers[3 * len(colors) :]]
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        return _to_host(pixels.to(torch.uint8).contiguous())

    def _sharpen(self, planes: Any) -> Any:
        """Their border is repeated outward, as on the CPU, and further until the shape is of the grain."""
        margin, (height, width) = self._work.overlap, planes.shape[2:]
        below, beside = (-(side + 2 * margin) % GRAIN for side in (height, width))
        padded = functional.pad(planes, (margin, margin + beside, margin, margin + below), mode="replicate")
        together = max(1, TOGETHER_PIXELS // (padded.shape[2] * padded.shape[3]))
        sharp = torch.cat([self._run(part) for part in padded.split(together)])
        inner = sharp[:, :, margin : margin + height, margin : margin + width]
        return inner.float().mul(255).round().clamp(0, 255)

    def _run(self, planes: Any) -> Any:
        if planes.is_cuda:
            self._tune(tuple(planes.shape))
        (found,) = pick(self._model.call([_channels_last((planes / 255).to(self._dtype))]), self._model.outputs)
        return found

    def _tune(self, shape: tuple[int, ...]) -> None:
        """Of the whole process, and so for other threads, too: what they then do takes as long as before, or less."""
        if len(self._seen) > SHAPES:
            self._seen.clear()
        self._seen[shape] += 1
        torch.backends.cudnn.benchmark = self._seen[shape] > TUNED_AFTER


def _to_host(pixels: Any) -> Any:
    """By pinned memory, which a GPU copies to several times as fast; PyTorch keeps it for the next.

    Who waits gives up its core, which other images are decoded and encoded on: to wait for a stream would keep it busy.
    """
    if not pixels.is_cuda:
        return pixels
    found = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    found.copy_(pixels, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record()
    copied.synchronize()
    return found


def _channels_last(planes: Any) -> Any:
    """Planes of one channel are so already, but only these strides tell a convolution."""
    height, width = planes.shape[2:]
    return planes.contiguous().as_strided(planes.shape, (height * width, 1, width, 1))


class _Bicubic:
    """Pillow's interpolation in its own whole numbers: along rows, rounded, then along columns, rounded."""

    def __init__(self, scale: int, device: Any) -> None:
        self._scale = scale
        self._device = device
        self._weights: dict[int, Any] = {}  # by how many pixels there are along a side

    def enlarge(self, planes: Any) -> Any:
        return self._along(self._along(planes, 3), 2) if self._scale > 1 else planes

    def _along(self, planes: Any, axis: int) -> Any:
        """The pixels that a neighbour gives are told apart by a dimension of their own: a pass for each neighbour."""
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
            found = self._weights[length] = torch.from_numpy(_weights(length, self._scale)).to(self._device)
        return found


def _weights(length: int, scale: int) -> NDArray[np.int32]:
    """[neighbours, length, scale]: how much the pixels from SUPPORT before one to SUPPORT after it count in each of the
    pixels that it becomes."""
    middle = (np.arange(length * scale) + 0.5) / scale
    first = np.maximum(0, (middle - SUPPORT + 0.5).astype(np.int64))
    last = np.minimum(length, (middle + SUPPORT + 0.5).astype(np.int64))
    neighbours = np.arange(length).repeat(scale)[:, None] + np.arange(-SUPPORT, SUPPORT + 1)
    is_near = (neighbours >= first[:, None]) & (neighbours < last[:, None])
    weights = np.where(is_near, _cubic(neighbours - middle[:, None] + 0.5), 0.0)
    weights = weights / weights.sum(1, keepdims=True) * (1 << PRECISION)
    whole = np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32)
    return np.ascontiguousarray(whole.T).reshape(-1, length, scale)


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' kernel with a = -0.5, as Pillow has it."""
    far = np.abs(distance)
    near = (1.5 * far - 2.5) * far * far + 1
    return np.where(far < 1, near, np.where(far < SUPPORT, (((far - 5) * far + 8) * far - 4) * -0.5, 0.0))


class _Colors:
    """What Pillow adds to a pixel's luminance for its colours: looked up, as its own whole numbers are."""

    def __init__(self, device: Any) -> None:
        levels = np.arange(256, dtype=np.uint8)
        blue, red = np.meshgrid(levels, levels, indexing="ij")
        # Black shows what is added and white what is taken away: each where the other is cut off.
        black, white = (_convert(np.full_like(blue, level), blue, red) for level in (0, 255))
        added = np.where(black > 0, black, white - 255).astype(np.float32)
        self._tables = torch.from_numpy(added).reshape(-1, 3).to(device)

    def to_rgb(self, layers: Sequence[Any]) -> Any:
        """[batch, height, width, 3] from three without the last dimension."""
        luminance, blue, red = layers
        return self._tables[blue.mul(256).add_(red).long()].add_(luminance.unsqueeze(3)).clamp_(0, 255)


def _convert(luminance: Pixels, blue: Pixels, red: Pixels) -> NDArray[np.int16]:
    pixels = np.stack((luminance, blue, red), -1)
    image = Image.frombytes("YCbCr", (pixels.shape[1], pixels.shape[0]), pixels.tobytes())
    return np.asarray(image.convert("RGB")).astype(np.int16)
