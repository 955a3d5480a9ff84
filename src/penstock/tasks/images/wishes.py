"""What a request's parameters ask of an image's answer: what is done to it, how large it is, and its file's format."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from penstock.core.errors import InvalidRequest
from penstock.core.requests import Parameter
from penstock.tasks.generate.parameters import Number, refuse

UPSCALE, DENOISE = "upscale", "denoise"
PNG, JPEG, WEBP = "png", "jpeg", "webp"
FORMATS = {PNG: PNG, JPEG: JPEG, "jpg": JPEG, WEBP: WEBP}
MAX_SIDES = {JPEG: 65_500, WEBP: 16_383}  # pixels that the formats can say; PNG has room for any image of ours
DEFAULT_QUALITY = 90
_QUALITY = Number(1, 100, is_whole=True)
_LINES = {"4k": 2160, "8k": 4320}
_RESOLUTIONS = "a factor such as 2x, lines such as 720p, 1080p, 4k or 8k, or a frame such as 1920x1080"

Size = tuple[int, int]  # width, height


@dataclass(frozen=True, slots=True)
class Resolution:
    """How large an answer is to be: a factor, or a frame that it fills as far as its proportions allow."""

    said: str
    factor: Fraction | None = None
    frame: Size = (0, 0)
    may_turn: bool = False  # the frame stands upright where the image does

    def size(self, image: Size) -> Size:
        factor = self._factor(image)
        width, height = (max(1, round(side * factor)) for side in image)
        return width, height

    def most_pixels(self, pixels: int) -> int:
        """What an image of so many pixels can become at most."""
        return int(pixels * self.factor**2) + 1 if self.factor is not None else self.frame[0] * self.frame[1]

    def _factor(self, image: Size) -> Fraction:
        if self.factor is not None:
            return self.factor
        width, height = self.frame[::-1] if self.may_turn and image[0] < image[1] else self.frame
        return min(Fraction(width, image[0]), Fraction(height, image[1]))


@dataclass(frozen=True, slots=True)
class ImageWishes:
    mode: str = UPSCALE
    format: str = PNG
    quality: int = DEFAULT_QUALITY  # of what is lossy
    resolution: Resolution | None = None  # None: what the mode makes of an image

    def check_size(self, size: Size) -> None:
        """Raises InvalidRequest where the format cannot hold it."""
        most = MAX_SIDES.get(self.format)
        if most is not None and max(size) > most:
            raise InvalidRequest(
                f"the answer would have {size[0]} × {size[1]} pixels, and a {self.format} file has at most {most} "
                "along a side: ask for format png, or for a smaller resolution",
                parameter="format",
            )


PLAIN_WISHES = ImageWishes()


def read_wishes(parameters: Mapping[str, Parameter], modes: tuple[str, ...]) -> ImageWishes:
    """`modes` are those that the model has. Raises InvalidRequest for what cannot be meant."""
    if not parameters:
        return PLAIN_WISHES
    wanted = _format(parameters.get("format", PNG))
    quality = parameters.get("quality")
    if quality is not None and wanted == PNG:
        raise InvalidRequest(
            "parameter 'quality' is for jpeg and webp: a png file loses nothing; leave it out, or name the format",
            parameter="quality",
        )
    return ImageWishes(
        _mode(parameters.get("mode", UPSCALE), modes),
        wanted,
        DEFAULT_QUALITY if quality is None else _QUALITY("quality", quality),
        _resolution(parameters.get("resolution")),
    )


def _mode(said: Parameter, modes: tuple[str, ...]) -> str:
    mode = str(said).strip().lower()
    if mode in modes:
        return mode
    if mode == DENOISE:
        raise InvalidRequest(
            "parameter 'mode' is 'denoise', and this model has no network for it: call one that has (srcnn), "
            "or name its file in upscale.denoise",
            parameter="mode",
        )
    raise refuse("mode", said, " or ".join(modes))


def _format(said: Parameter) -> str:
    found = FORMATS.get(str(said).strip().lower())
    if found is None:
        raise refuse("format", said, "png, jpeg or webp")
    return found


def _resolution(said: Parameter | None) -> Resolution | None:
    if said is None:
        return None
    text = said.strip().lower() if isinstance(said, str) else ""
    if found := re.fullmatch(r"(\d{1,2}(?:\.\d{1,3})?)x|x(\d{1,2}(?:\.\d{1,3})?)", text):
        factor = Fraction(found[1] or found[2])
        if factor > 0:
            return Resolution(text, factor)
    lines = _LINES.get(text) or int(found[1] if (found := re.fullmatch(r"(\d{2,5})p", text)) else 0)
    if lines:  # of a screen of 16:9, an even number of pixels wide
        return Resolution(text, frame=(-(-lines * 8 // 9) * 2, lines), may_turn=True)
    if (found := re.fullmatch(r"(\d{1,6})\s?[x×]\s?(\d{1,6})", text)) and int(found[1]) and int(found[2]):
        return Resolution(text, frame=(int(found[1]), int(found[2])))
    raise refuse("resolution", said, _RESOLUTIONS)
