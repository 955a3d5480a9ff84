"""Limits on JSON texts: the memory that they take when parsed, and the depth of their nesting. Pure: no I/O."""

import re
from collections.abc import Sequence
from typing import Any

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.core.tensors import Buffer

PIECE_BYTES = 1024 * 1024  # counted at once; other threads run between the pieces
MAX_NESTING = 200  # levels; the encoder and recursive readers manage little more
TRAILING_BYTES = bytes(range(0x80, 0xC0))  # the bytes of a character after its first
BEYOND_LATIN_PATTERN = re.compile(rb"[\xc4-\xf7]")  # first bytes of characters that take two or four bytes in memory
BEYOND_16_BITS_PATTERN = re.compile(rb"[\xf0-\xf7]")
# An escape of a character that takes four bytes in memory. Its digits may be in the next piece.
SURROGATE_PATTERN = re.compile(rb"\\u(?:[dD](?:[89abAB]|\Z)|\Z)")


def check_json_size(raw: Buffer, limits: Limits, piece_bytes: int = PIECE_BYTES) -> None:
    """Raise RequestTooLarge if the JSON text has too many values or keys, or texts that take too much memory.

    Values and keys are counted by their punctuation outside strings. Invalid JSON is left to the parser.
    """
    values = keys = is_inside = 0
    memory = _TextMemory()
    cut = b""  # a backslash at the end of a piece, whose escaped character is in the next piece
    for start in range(0, len(raw), piece_bytes):
        piece = cut + bytes(raw[start : start + piece_bytes])
        cut = b""
        if b"\\" in piece:  # some quotes may be escaped
            piece = piece.replace(b"\\\\", b"_").replace(b'\\"', b"_")
            if piece.endswith(b"\\"):
                piece, cut = piece[:-1], b"\\"
        parts = piece.split(b'"')
        plain = b"".join(parts[is_inside::2])
        memory.add(parts[1 - is_inside :: 2], _find_character_bytes(piece), bool(is_inside), len(parts) == 1)
        is_inside ^= (len(parts) - 1) & 1
        keys += plain.count(b":")
        values += plain.count(b",") + plain.count(b"[") + plain.count(b"{")
        _check_counts(values, keys, memory.size_bytes, limits)


def check_json_nesting(raw: Buffer, value: Any) -> None:
    """Raise InvalidRequest if `value`, which was parsed from `raw`, is nested so deep that it could not be encoded."""
    pieces = (bytes(raw[start : start + PIECE_BYTES]) for start in range(0, len(raw), PIECE_BYTES))
    if sum(piece.count(b"[") + piece.count(b"{") for piece in pieces) <= MAX_NESTING:
        return
    level, depth = [value], 0
    while level := [each for each in level if type(each) is dict or type(each) is list]:
        depth += 1
        if depth > MAX_NESTING:
            raise InvalidRequest(f"the JSON is nested deeper than {MAX_NESTING} levels")
        level = [child for each in level for child in (each.values() if type(each) is dict else each)]


class _TextMemory:
    """The memory that texts take when parsed: each character takes as much as the widest character of its text."""

    def __init__(self) -> None:
        self._complete_bytes = 0
        self._characters, self._width = 0, 1  # of the last text, which may continue in the next piece

    @property
    def size_bytes(self) -> int:
        return self._complete_bytes + self._characters * self._width

    def add(self, texts: Sequence[bytes], width: int, is_continued: bool, is_inside_text: bool) -> None:
        """Add the texts of a piece, in which a character takes at most `width` bytes.

        `is_continued`: the first text began in an earlier piece. `is_inside_text`: no text begins or ends in the piece.
        """
        if is_continued:
            self._characters += _count_characters(texts[0], width)
            self._width = max(self._width, width)
            if is_inside_text:
                return
            texts = texts[1:]
        if texts:
            self._complete_bytes = self.size_bytes + width * _count_characters(b"".join(texts[:-1]), width)
            self._characters, self._width = _count_characters(texts[-1], width), width


def _find_character_bytes(piece: bytes) -> int:
    """Return the memory of the widest character of a piece: 1, 2 or 4 bytes."""
    is_ascii, has_escapes = piece.isascii(), b"\\u" in piece
    if (not is_ascii and BEYOND_16_BITS_PATTERN.search(piece)) or (has_escapes and SURROGATE_PATTERN.search(piece)):
        return 4
    return 2 if has_escapes or (not is_ascii and BEYOND_LATIN_PATTERN.search(piece)) else 1


def _count_characters(text: bytes, width: int) -> int:
    if width == 1:
        return len(text)
    return len(text) - len("0000u") * text.count(b"\\u") - (0 if text.isascii() else _count_trailing(text))


def _count_trailing(text: bytes) -> int:
    return len(text) - len(text.translate(None, TRAILING_BYTES))


def _check_counts(values: int, keys: int, text_bytes: int, limits: Limits) -> None:
    if values > limits.max_values:
        raise RequestTooLarge(
            f"the JSON has more than {limits.max_values} values: send tensors as binary data, or split the request"
        )
    if keys > limits.max_keys:
        raise RequestTooLarge(f"the JSON has more than {limits.max_keys} keys: send fewer")
    if text_bytes > limits.max_text_bytes:
        raise RequestTooLarge(
            f"the texts in the JSON take {text_bytes} bytes of memory, over one and a half times "
            f"limits.max_message_bytes ({limits.max_message_bytes}): send them as binary data, or split the request"
        )
