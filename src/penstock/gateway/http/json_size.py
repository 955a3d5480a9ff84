"""What parsing JSON would build, counted before it is: by the punctuation outside its strings."""

from penstock.core.config import Limits
from penstock.core.errors import RequestTooLarge
from penstock.core.tensors import Buffer

PIECE_BYTES = 1024 * 1024  # at a time: other threads get their turn between


def check_size(raw: Buffer, limits: Limits, piece_bytes: int = PIECE_BYTES) -> None:
    """Raises as soon as there are too many values or keys. What is not JSON, the parser says."""
    values = keys = is_inside = 0
    cut = b""  # a backslash whose character is in the next piece
    for start in range(0, len(raw), piece_bytes):
        piece = cut + bytes(raw[start : start + piece_bytes])
        cut = b""
        if b"\\" in piece:  # then some quotes may be escaped
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            if piece.endswith(b"\\"):
                piece, cut = piece[:-1], b"\\"
        parts = piece.split(b'"')
        plain = b"".join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) & 1
        keys += plain.count(b":")
        values += plain.count(b",") + plain.count(b"[") + plain.count(b"{")
        if values > limits.max_values:
            raise RequestTooLarge(
                f"the JSON has more than {limits.max_values} values (limits.max_values): "
                f"send tensors as binary data, or split the request"
            )
        if keys > limits.max_keys:
            raise RequestTooLarge(f"the JSON has more than {limits.max_keys} keys (limits.max_keys): send fewer")
