"""Images as clients send them: JPEG or PNG bytes in, eight-bit pixels upright; and PNG bytes out.

Pillow gets a copy of the file without its metadata. Its metadata parsers warn through Python's process-wide
warnings about files that strangers send, and silencing those is not thread-safe; what we need of the
metadata, the orientation, takes a few lines. Its decoders are opened by class: `Image.open` would try
multi-picture parsing too, and has a pixel limit of its own, with warnings.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from penstock.core.errors import InvalidImage

MAX_SIDE = 65_535  # what JPEG can say; a strip of one pixel by millions costs more than its pixels

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = frozenset({b"IHDR", b"PLTE", b"tRNS", b"iCCP", b"sRGB", b"IDAT", b"IEND"})
_JPEG_MAGIC = b"\xff\xd8"
_JPEG_SCAN = 0xDA
_JPEG_EXIF = 0xE1
_JPEG_BARE = frozenset({0x00, 0x01, *range(0xD0, 0xDA)})  # markers that no length follows
# Comments and application segments, but for JFIF, ICC and Adobe, which say how to read the colours.
_JPEG_DROPPED = frozenset({*range(0xE0, 0xF0), 0xFE} - {0xE0, 0xE2, 0xEE})
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# All that Pillow's two decoders were seen to raise on damaged files.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """An image of which only the header has been read."""

    image: JpegImageFile | PngImageFile
    orientation: int

    @property
    def pixels(self) -> int:
        return self.image.width * self.image.height

    @property
    def size(self) -> str:
        return f"{self.image.width} × {self.image.height}"


@dataclass(frozen=True, slots=True)
class DecodedImage:
    image: Image.Image  # L, LA, RGB or RGBA
    color_profile: bytes | None


def read_header(data: bytes) -> ImageHeader:
    kind: type[JpegImageFile] | type[PngImageFile]
    if data.startswith(_PNG_MAGIC):
        kind, (kept, exif) = PngImageFile, _strip_png(data)
    elif data.startswith(_JPEG_MAGIC):
        kind, (kept, exif) = JpegImageFile, _strip_jpeg(data)
    else:
        raise InvalidImage("not a JPEG or PNG image: send the bytes of a file in one of these formats")
    try:
        image = kind(BytesIO(kept))
    except _DAMAGE as error:
        raise _damaged(error) from error
    header = ImageHeader(image, _read_orientation(exif))
    if max(image.size) > MAX_SIDE:
        raise InvalidImage(f"the image says it has {header.size} pixels; no side may be over {MAX_SIDE}: send parts")
    return header


def decode(header: ImageHeader) -> DecodedImage:
    image = header.image
    try:
        image.load()
    except _DAMAGE as error:
        raise _damaged(error) from error
    profile = image.info.get("icc_profile")
    plain = _to_eight_bits(image)
    method = _UPRIGHT.get(header.orientation)
    if method is not None:
        plain = plain.transpose(method)
    return DecodedImage(plain, _matching_profile(profile, plain.mode))


def encode_png(decoded: DecodedImage) -> bytes:
    file = BytesIO()
    # A photograph of 640 × 480: 17 ms and 377 kB. Pillow's default takes 90 ms for 368 kB, level 1 by
    # itself 18 ms for 404 kB. Encoding must not cost more than the network does.
    options = {"compress_level": 1, "compress_type": zlib.Z_RLE}
    decoded.image.save(file, "PNG", icc_profile=decoded.color_profile, **options)
    return file.getvalue()


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """L, LA, RGB or RGBA, whatever the file had."""
    if image.mode in ("I;16", "I;16B", "I"):  # Pillow's own conversion clips at 255
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    is_gray = image.mode in ("1", "L", "LA")
    if image.has_transparency_data:
        return image.convert("LA" if is_gray else "RGBA")
    return image.convert("L" if is_gray else "RGB")


def _matching_profile(profile: bytes | None, mode: str) -> bytes | None:
    """The colour profile, unless it is of colours that our answer no longer has (CMYK)."""
    space = b"GRAY" if mode in ("L", "LA") else b"RGB "
    return profile if profile and profile[16:20] == space else None


def _strip_png(data: bytes) -> tuple[bytes, bytes]:
    """Returns (the file with the chunks that make its pixels, its EXIF)."""
    view, kept, exif = memoryview(data), [memoryview(_PNG_MAGIC)], b""
    for name, start, end in _png_chunks(data):
        if name == b"acTL":
            raise InvalidImage("an animated PNG: send one frame as a PNG of its own")
        if name == b"eXIf":
            exif = data[start + 8 : end - 4]
        elif name in _PNG_KEPT:
            kept.append(view[start:end])
    return b"".join(kept), exif


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields (name, start, end); the last may reach past the data where the file is cut."""
    start, name = len(_PNG_MAGIC), b""
    while start + 8 <= len(data) and name != b"IEND":
        length, name = struct.unpack_from(">I4s", data, start)
        yield name, start, start + length + 12
        start += length + 12


def _strip_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """Returns (the file without metadata segments, its EXIF)."""
    view, kept, exif = memoryview(data), [memoryview(_JPEG_MAGIC)], b""
    for marker, start, end in _jpeg_segments(data):
        if marker == _JPEG_EXIF and data.startswith(b"Exif\0\0", start + 4):
            exif = exif or data[start + 10 : end]
        if marker not in _JPEG_DROPPED:
            kept.append(view[start:end])
    return b"".join(kept), exif


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields (marker, start, end); the first scan comes last and reaches to the end of the file."""
    start = data.find(b"\xff", len(_JPEG_MAGIC))
    while 0 <= start <= len(data) - 4:
        marker = data[start + 1]
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if marker == _JPEG_SCAN:
            yield marker, start, len(data)
            return
        if marker in _JPEG_BARE:
            end = start + 2
        elif marker == 0xFF:  # a fill byte
            end = start + 1
        elif start + 4 <= end <= len(data):
            yield marker, start, end
        else:
            break
        start = data.find(b"\xff", end)  # decoders skip what lies between segments, and so must we
    raise InvalidImage("the JPEG image is cut short or damaged before its first pixel: send the whole file")


def _read_orientation(exif: bytes) -> int:
    """EXIF's orientation, 1 (upright) where there is none that can be read."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, directory)
        for index in range(count):
            tag, _type, _count, value = struct.unpack_from(f"{order}HHIH", exif, directory + 2 + 12 * index)
            if tag == _ORIENTATION:
                return int(value)
    except struct.error:
        pass
    return 1


def _damaged(error: BaseException) -> InvalidImage:
    return InvalidImage(f"the image is damaged or cut short ({error}): send the whole file, or save it anew")
