"""Messages that are expensive to read: compressed zeros, messages in tiny fragments, endless pings."""

import asyncio
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from functools import partial

import httpx

from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.repository import ANY_SIZE_MODEL

BOMBS = 64
BOMB_BYTES = 60 * 1024 * 1024
SOCKETS = 16
FLOOD_S = 6.0
TEXT, FRAGMENT, PING = 1, 0, 9


def _make_bombs() -> Iterable[bytes]:
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    fits = packer.compress(b'{"inputs": [' + b" " * BOMB_BYTES) + packer.compress(b"]}") + packer.flush()
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    bursts = b"".join([packer.compress(bytes(BOMB_BYTES)) for _ in range(20)]) + packer.flush()
    return fits, bursts


async def _send_gzip_bombs(scene: Scene) -> None:
    bodies = await asyncio.to_thread(_make_bombs)
    codes: Counter[int] = Counter()

    async def send(client: httpx.AsyncClient, body: bytes) -> None:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        answer = await client.post(f"/v2/models/{ANY_SIZE_MODEL}/infer", content=body, headers=headers)
        codes[answer.status_code] += 1

    async with (
        httpx.AsyncClient(base_url=scene.server.http_url, timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(BOMBS // 2):
            for body in bodies:
                group.create_task(send(client, body))
    scene.must(set(codes) <= {400, 413, 429}, f"answered {dict(codes)}")


def _encode_frame(opcode: int, data: bytes = b"", is_final: bool = True) -> bytes:
    return bytes([opcode | (0x80 if is_final else 0), 0x80 | len(data)]) + bytes(4) + data


async def _flood(scene: Scene, begin: bytes, frames: bytes) -> None:
    async def send() -> bool:
        """Send the frames; return True if the server closed the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.server.http_port)
        key = os.urandom(12).hex()[:22].encode() + b"=="
        writer.write(
            b"GET /v2/models/%s/stream HTTP/1.1\r\nhost: %s\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: %s\r\n\r\n"
            % (ANY_SIZE_MODEL.encode(), scene.server.http.encode(), key)
        )
        heard = await reader.readuntil(b"\r\n\r\n")
        scene.must(b" 101 " in heard, f"no WebSocket: {heard[:200]!r}")
        writer.write(begin)
        try:
            async with asyncio.timeout(FLOOD_S):
                while not reader.at_eof():
                    writer.write(frames)
                    await writer.drain()
        except OSError as error:
            return not isinstance(error, TimeoutError)
        finally:
            writer.transport.abort()
        return True

    thrown_out = await asyncio.gather(*(send() for _ in range(SOCKETS)))
    scene.must(all(thrown_out), f"{thrown_out.count(False)} of {SOCKETS} may go on for ever")


CRUMB = _encode_frame(FRAGMENT, b"a", is_final=False)
ATTACKS = (
    Attack("4 gzip bombs", _send_gzip_bombs),
    Attack(
        "4 WebSocket fragments", partial(_flood, begin=_encode_frame(TEXT, b"a", is_final=False), frames=CRUMB * 30_000)
    ),
    Attack("4 WebSocket pings", partial(_flood, begin=b"", frames=_encode_frame(PING, b"are you there?") * 15_000)),
)
