"""Reads the options of an image answer from a request's parameters: mode, resolution, file format and quality."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from penstock.core.errors import InvalidRequest
from penstock.core.requests import Parameter
from penstock.tasks.generate.parameters import NumberReader, invalid_parameter

UPSCALE, DENOISE = "upscale", "denoise"
PNG, JPEG, WEBP = "png", "jpeg", "webp"
FORMATS = {PNG: PNG, JPEG: JPEG, "jpg": JPEG, WEBP: WEBP}
MAX_SIDES = {JPEG: 65_500, WEBP: 16_383}  # in pixels; PNG's limit is larger than any image
DEFAULT_QUALITY = 90
_QUALITY = NumberReader(1, 100, is_integer=True)
_LINES = {"4k": 2160, "8k": 4320}
_RESOLUTIONS = "a factor such as 2x, lines such as 720p, 1080p, 4k or 8k, or a frame such as 1920x1080"

Size = tuple[int, int]  # width, height


@dataclass(frozen=True, slots=True)
class Resolution:
    """The requested size of an answer: a factor, or a frame into which the image is fitted, keeping its proportions."""

    requested_text: str
    factor: Fraction | None = None
    frame: Size = (0, 0)
    may_rotate: bool = False  # use the frame upright if the image is upright

    def size(self, image: Size) -> Size:
        factor = self._scale_factor(image)
        width, height = (max(1, round(side * factor)) for side in image)
        return width, height

    def most_pixels(self, pixels: int) -> int:
        """Return the most pixels that the answer to an image with this number of pixels may have."""
        return int(pixels * self.factor**2) + 1 if self.factor is not None else self.frame[0] * self.frame[1]

    def _scale_factor(self, image: Size) -> Fraction:
        if self.factor is not None:
            return self.factor
        width, height = self.frame[::-1] if self.may_rotate and image[0] < image[1] else self.frame
        return min(Fraction(width, image[0]), Fraction(height, image[1]))


@dataclass(frozen=True, slots=True)
class OutputOptions:
    mode: str = UPSCALE
    format: str = PNG
    quality: int = DEFAULT_QUALITY  # of jpeg and webp
    resolution: Resolution | None = None  # None: the size of the network's output

    def check_size(self, size: Size) -> None:
        """Raise InvalidRequest if the format does not support this size."""
        most = MAX_SIDES.get(self.format)
        if most is not None and max(size) > most:
            raise InvalidRequest(
                f"the answer would have {size[0]} × {size[1]} pixels, and a {self.format} file has at most {most} "
                "along a side: request format png, or a smaller resolution",
                parameter="format",
            )


DEFAULTS = OutputOptions()


def read_output_options(parameters: Mapping[str, Parameter], modes: tuple[str, ...]) -> OutputOptions:
    """Read the options; raise InvalidRequest if one is invalid. `modes`: the modes of the model."""
    if not parameters:
        return DEFAULTS
    wanted = _read_format(parameters.get("format", PNG))
    quality = parameters.get("quality")
    if quality is not None and wanted == PNG:
        raise InvalidRequest(
            "parameter 'quality' is for jpeg and webp, since png is lossless: leave it out, or set the format",
            parameter="quality",
        )
    return OutputOptions(
        _read_mode(parameters.get("mode", UPSCALE), modes),
        wanted,
        DEFAULT_QUALITY if quality is None else _QUALITY("quality", quality),
        _read_resolution(parameters.get("resolution")),
    )


def _read_mode(value: Parameter, modes: tuple[str, ...]) -> str:
    mode = str(value).strip().lower()
    if mode in modes:
        return mode
    if mode == DENOISE:
        raise InvalidRequest(
            "parameter 'mode' is 'denoise', but this model has no network for that: call a model that has one "
            "(srcnn), or set upscale.denoise to the network's file",
            parameter="mode",
        )
    raise invalid_parameter("mode", value, " or ".join(modes))


def _read_format(value: Parameter) -> str:
    found = FORMATS.get(str(value).strip().lower())
    if found is None:
        raise invalid_parameter("format", value, "png, jpeg or webp")
    return found


def _read_resolution(value: Parameter | None) -> Resolution | None:
    if value is None:
        return None
    text = value.strip().lower() if isinstance(value, str) else ""
    if found := re.fullmatch(r"(\d{1,2}(?:\.\d{1,3})?)x|x(\d{1,2}(?:\.\d{1,3})?)", text):
        factor = Fraction(found[1] or found[2])
        if factor > 0:
            return Resolution(text, factor)
    lines = _LINES.get(text) or int(found[1] if (found := re.fullmatch(r"(\d{2,5})p", text)) else 0)
    if lines:  # the frame of a 16:9 screen with an even width
        return Resolution(text, frame=(-(-lines * 8 // 9) * 2, lines), may_rotate=True)
    if (found := re.fullmatch(r"(\d{1,6})\s?[x×]\s?(\d{1,6})", text)) and int(found[1]) and int(found[2]):
        return Resolution(text, frame=(int(found[1]), int(found[2])))
    raise invalid_parameter("resolution", value, _RESOLUTIONS)
