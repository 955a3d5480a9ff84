"""Decodes JPEG and PNG files into upright eight-bit pixels.

Pillow gets a copy of the file without metadata, because its metadata parsers report faulty files through Python's
process-wide warnings, which cannot be silenced in a thread-safe way. This module reads the orientation itself. It opens
Pillow's decoders by class, because `Image.open` would also parse multi-picture files, and has a pixel limit of its own
that uses warnings.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from penstock.core.errors import InvalidImage
from penstock.core.tensors import Buffer
from penstock.tasks.images.png import MAGIC as PNG_MAGIC

MAX_SIDE = 65_535  # JPEG's limit; also for PNG, because a very long strip costs more than its number of pixels suggests
# Limits of the work in Python per file. Cameras write dozens of segments, and chunks of at least 4 KiB.
MAX_SEGMENTS = 512
MAX_CHUNKS = 16_384
MAX_GAP = 64 * 1024  # stray bytes between two segments

_PNG_KEPT = frozenset({b"IHDR", b"PLTE", b"tRNS", b"iCCP", b"sRGB", b"IDAT", b"IEND"})
_JPEG_MAGIC = b"\xff\xd8"
_JPEG_SCAN = 0xDA
_JPEG_END = 0xD9
_JPEG_NEXT = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # 0xff within pixels is followed by a zero
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # these segments have the image's size
_JPEG_EXIF = 0xE1
_JPEG_BARE = frozenset({0x00, 0x01, *range(0xD0, 0xDA)})  # markers without a length
# Comments and application segments except JFIF, ICC and Adobe, which define the colours.
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
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height
# Exceptions that Pillow's two decoders raise for damaged files.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, AssertionError, struct.error)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """An image whose pixels are not decoded yet."""

    image: JpegImageFile | PngImageFile
    orientation: int
    scans: int = 1  # a progressive JPEG has several, each over all pixels

    @property
    def pixels(self) -> int:
        return self.image.width * self.image.height

    @property
    def size(self) -> str:
        return f"{self.image.width} × {self.image.height}"

    @property
    def upright(self) -> tuple[int, int]:
        """Return the width and height after the orientation is applied."""
        width, height = self.image.size
        return (height, width) if self.orientation in _SIDEWAYS else (width, height)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    image: Image.Image  # L, LA, RGB or RGBA
    color_profile: bytes | None


def read_header(data: bytes) -> ImageHeader:
    kind: type[JpegImageFile] | type[PngImageFile]
    scans = 1
    if data.startswith(PNG_MAGIC):
        kind, (kept, exif) = PngImageFile, _strip_png(data)
    elif data.startswith(_JPEG_MAGIC):
        kind, (kept, exif) = JpegImageFile, _strip_jpeg(data)
        scans = _count_scans(kept)
    else:
        raise InvalidImage("the data is not a JPEG or PNG image: send the bytes of a file in one of these formats")
    try:
        image = kind(BytesIO(kept))
    except _DAMAGE as error:
        raise _damaged_image_error(error) from error
    header = ImageHeader(image, _read_orientation(exif), scans)
    if max(image.size) > MAX_SIDE:
        raise InvalidImage(
            f"the image's header declares {header.size} pixels; no side may exceed {MAX_SIDE}: send parts of the image"
        )
    if header.pixels != count_pixels(data):
        raise InvalidImage("the image declares two different sizes: save it again")
    return header


def count_pixels(data: Buffer) -> int:
    """Return the number of pixels that the header declares, or 0 if it is unreadable. This takes microseconds."""
    if data[: len(PNG_MAGIC)] == PNG_MAGIC:
        width, height = struct.unpack_from(">II", data, 16) if len(data) >= 24 else (0, 0)
        return int(width * height)
    pixels = 0
    if data[: len(_JPEG_MAGIC)] == _JPEG_MAGIC:
        try:
            for marker, start, _ in _jpeg_segments(data):
                if marker in _JPEG_FRAMES:
                    height, width = struct.unpack_from(">HH", data, start + 5)
                    pixels = width * height
        except (InvalidImage, struct.error):
            return 0
    return pixels


def decode(header: ImageHeader) -> DecodedImage:
    image = header.image
    try:
        image.load()
        plain = _to_eight_bits(image)
    except _DAMAGE as error:
        raise _damaged_image_error(error) from error
    profile = image.info.get("icc_profile")
    method = _UPRIGHT.get(header.orientation)
    if method is not None:
        plain = plain.transpose(method)
    return DecodedImage(plain, _matching_profile(profile, plain.mode))


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Convert any mode to L, LA, RGB or RGBA."""
    if image.mode in ("I;16", "I;16B", "I"):  # Pillow's conversion clips at 255
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    is_gray = image.mode in ("1", "L", "LA")
    mode = ("L" if is_gray else "RGB") + ("A" if image.has_transparency_data else "")
    return image if image.mode == mode else image.convert(mode)  # convert copies, even to the same mode


def _matching_profile(profile: bytes | None, mode: str) -> bytes | None:
    """Return the colour profile, or None if it is for a different colour space than the image's mode."""
    space = b"GRAY" if mode in ("L", "LA") else b"RGB "
    return profile if profile and profile[16:20] == space else None


def _strip_png(data: bytes) -> tuple[bytes, bytes]:
    """Return a PNG file with only the chunks that define its pixels, and its EXIF data."""
    view, kept, exif = memoryview(data), [memoryview(PNG_MAGIC)], b""
    seen: set[bytes] = set()  # duplicates are dropped, because they may be expensive to unpack
    for name, start, end in _png_chunks(data):
        if name == b"acTL":
            raise InvalidImage("the image is an animated PNG: send one frame as a separate PNG")
        if name == b"eXIf":
            exif = data[start + 8 : end - 4]
        elif name in _PNG_KEPT and name not in seen:
            kept.append(view[start:end])
            seen |= {name} - {b"IDAT"}
    return b"".join(kept), exif


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, start and end of each chunk. If the file is cut short, the last end is beyond the data."""
    start, name = len(PNG_MAGIC), b""
    for _ in range(MAX_CHUNKS):
        if start + 8 > len(data) or name == b"IEND":
            return
        length, name = struct.unpack_from(">I4s", data, start)
        yield name, start, start + length + 12
        start += length + 12
    raise InvalidImage(f"the PNG image has more than {MAX_CHUNKS} chunks: save it again")


def _strip_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """Return a JPEG file without its metadata segments, and its EXIF data."""
    view, kept, exif = memoryview(data), [memoryview(_JPEG_MAGIC)], b""
    for marker, start, end in _jpeg_segments(data):
        if marker == _JPEG_EXIF and data.startswith(b"Exif\0\0", start + 4):
            exif = exif or data[start + 10 : end]
        if marker not in _JPEG_DROPPED:
            kept.append(view[start:end])
    return b"".join(kept), exif


def _jpeg_segments(data: Buffer) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment. The last is the first scan, with the rest of the file."""
    start = _find_marker(data, len(_JPEG_MAGIC))
    for _ in range(MAX_SEGMENTS):
        if not 0 <= start <= len(data) - 4:
            break
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
        start = _find_marker(data, end)  # decoders skip bytes between segments, too
    else:
        raise InvalidImage(f"the JPEG image has more than {MAX_SEGMENTS} segments before its pixels: save it again")
    raise InvalidImage("the JPEG image is cut short or damaged before its first pixel: send the whole file")


def _count_scans(data: bytes) -> int:
    """Count the scans of a JPEG image, up to its end marker; other images may follow in the file."""
    *_, (_, start, _) = _jpeg_segments(data)
    scans = 0
    for _ in range(MAX_SEGMENTS):
        found = _JPEG_NEXT.search(data, start)
        if found is None or (marker := data[found.start() + 1]) == _JPEG_END:
            return scans
        scans += marker == _JPEG_SCAN
        length = 0 if marker in _JPEG_BARE else int.from_bytes(data[found.end() : found.end() + 2], "big")
        start = found.end() + length
    raise InvalidImage(f"the JPEG image has more than {MAX_SEGMENTS} segments: save it again")


def _find_marker(data: Buffer, start: int) -> int:
    if data[start : start + 1] == b"\xff":
        return start
    found = bytes(data[start : start + MAX_GAP]).find(b"\xff")
    return -1 if found < 0 else start + found


def _read_orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data, or 1 (upright) if it is missing or unreadable."""
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


def _damaged_image_error(error: BaseException) -> InvalidImage:
    cause = "" if "unpack" in str(error) else f" ({error})"  # Pillow passes on messages of struct
    return InvalidImage(f"the image is damaged or cut short{cause}: send the whole file, or save it again")
