"""Writes PNG files band by band, so that a large image is never in memory as a whole.

Each row is replaced by its difference to the row above (filter Up) and compressed by ISA-L. For an enlarged photograph
of 1920 x 1080 pixels, this takes 14 ms and 2.1 MB; the best filter per row with zlib's run lengths takes 90 ms and 1.9
MB, Pillow's fastest setting 104 ms and 2.1 MB. Encoding must not take longer than the network on a GPU.
"""

import struct
from collections.abc import Iterable, Iterator

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

MAGIC = b"\x89PNG\r\n\x1a\n"
COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by channels: gray, with alpha, RGB, with alpha
UP = 2  # number of the filter in the standard
LEVEL = 1  # from 0 to 3
FILTERED_BYTES = 256 * 1024  # per step, which fit into a processor's cache
Rows = NDArray[np.uint8]


def encode_png(size: tuple[int, int], bands: Iterable[Rows], color_profile: bytes | None) -> list[bytes]:
    """Return the parts of a PNG file, to be joined. `bands`: arrays [rows, width, channels], from top to bottom."""
    parts = [MAGIC]
    compress = isal_zlib.compressobj(LEVEL)
    above: Rows | None = None
    for band in bands:
        channels = band.shape[2]
        if above is None:
            parts.append(_make_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, COLOR_TYPES[channels], 0, 0, 0)))
            if color_profile:
                parts.append(_make_chunk(b"iCCP", b"ICC Profile\0\0" + isal_zlib.compress(color_profile)))
            above = np.zeros(size[0] * channels, np.uint8)
        for rows in _iterate_slices(band.reshape(len(band), -1)):
            if packed := compress.compress(_filter_rows(rows, above).data):
                parts.append(_make_chunk(b"IDAT", packed))
            above = rows[-1]
    return [*parts, _make_chunk(b"IDAT", compress.flush()), _make_chunk(b"IEND", b"")]


def _iterate_slices(rows: Rows) -> Iterator[Rows]:
    count = max(1, FILTERED_BYTES // rows.shape[1])
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


def _filter_rows(rows: Rows, above: Rows) -> Rows:
    """Return the differences of the rows to the rows above; each row begins with the filter's number."""
    filtered = np.empty((rows.shape[0], rows.shape[1] + 1), np.uint8)
    filtered[:, 0] = UP
    np.subtract(rows[0], above, out=filtered[0, 1:])
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    return filtered


def _make_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", isal_zlib.crc32(data, isal_zlib.crc32(name)))
