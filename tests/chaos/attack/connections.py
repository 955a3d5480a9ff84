"""HTTP connections that send endlessly, too slowly or nothing: the server must close them, and serve other clients."""

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial

from tests.chaos.attack.strike import Attack, Scene

INFER = b"POST /v2/models/loose/infer HTTP/1.1\r\nhost: 127.0.0.1\r\n"
PART = b"a" * 65536
PARTS = 512  # 32 MiB of each endless header
ENDLESS = 24
SLOW = 400
SLOW_S = 12.0
UPLOADS = 100
UPLOAD_BYTES = 60 * 1024 * 1024
IDLE = 10_000
QUICK = {"limits": {"header_timeout_s": 2.0, "body_timeout_s": 2.0, "message_timeout_s": 5.0}}


class Connection:
    """A connection that the server may close at any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, scene: Scene) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", scene.server.http_port))

    async def send(self, data: bytes) -> bool:
        """Send the bytes; return False if the connection is closed."""
        if self._writer.is_closing():
            return False
        try:
            self._writer.write(data)
            async with asyncio.timeout(1.0):
                await self._writer.drain()
        except TimeoutError:
            pass
        except OSError:
            return False
        return not self._writer.is_closing() and not self._reader.at_eof()

    async def status(self, within_s: float) -> str:
        """Return the HTTP status of the answer, or a marker if the connection ended."""
        try:
            async with asyncio.timeout(within_s):
                line = await self._reader.readline()
        except TimeoutError:
            return "still open"
        except OSError:
            return "reset"
        return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"

    def close(self) -> None:
        with suppress(OSError):
            self._writer.transport.abort()


async def _send_endlessly(scene: Scene, begin: bytes, part: bytes = PART) -> None:
    async def send() -> int:
        connection = await Connection.open(scene)
        sent = 0
        is_taken = await connection.send(begin)
        while is_taken and sent < PARTS * len(PART):
            is_taken = await connection.send(part)
            sent += len(part)
        connection.close()
        return sent

    sent = await asyncio.gather(*(send() for _ in range(ENDLESS)))
    taken = sum(sent) / 2**20
    scene.must(taken < ENDLESS * PARTS / 32, f"{taken:.0f} MiB of {ENDLESS} endless headers were taken")


async def _send_endless_headers(scene: Scene) -> None:
    await _send_endlessly(scene, INFER + b"x: ")
    await _send_endlessly(scene, INFER, b"a: b\r\n" * 10_000)


async def _must_close_all(scene: Scene, connections: list[Connection], what: str) -> None:
    said = Counter(await asyncio.gather(*(connection.status(SLOW_S) for connection in connections)))
    for connection in connections:
        connection.close()
    scene.must(not said["still open"], f"{what}: {dict(said)}")
    scene.must(said["408"] or said["429"], f"no client gets an error: {dict(said)}")


async def _send_slow_headers(scene: Scene) -> None:
    connections = [await Connection.open(scene) for _ in range(SLOW)]
    for _ in range(3):
        for connection in connections:
            await connection.send(b"GET / HTTP/1.1\r\nx: " if _ == 0 else b"a")
        await asyncio.sleep(0.5)
    await _must_close_all(scene, connections, "half headers")


async def _send_slow_bodies(scene: Scene) -> None:
    small = [await Connection.open(scene) for _ in range(SLOW)]
    for connection in small:
        await connection.send(INFER + b"content-length: 100\r\n\r\n{")
    large = [await Connection.open(scene) for _ in range(UPLOADS)]
    head = INFER + b"content-length: %d\r\n\r\n" % UPLOAD_BYTES
    begun = 8 * 1024 * 1024 * b" "
    await asyncio.gather(*(connection.send(head + begun) for connection in large))

    async def drip() -> None:
        while True:
            for connection in large:
                await connection.send(b" ")
            await asyncio.sleep(0.5)

    dripping = asyncio.create_task(drip())
    await _must_close_all(scene, small, "half bodies")
    await _must_close_all(scene, large, "bodies in drops")
    dripping.cancel()


async def _open_many_connections(scene: Scene) -> None:
    connections: list[Connection] = []
    for _ in range(IDLE // 100):
        connections += await asyncio.gather(*(Connection.open(scene) for _ in range(100)))
    await asyncio.sleep(3)
    for connection in connections[:100]:
        scene.must(await connection.send(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"), "an idle one is closed")
    said = Counter([await connection.status(5.0) for connection in connections[:100]])
    for connection in connections:
        connection.close()
    scene.must(said == {"200": 100}, f"{IDLE} at once: {dict(said)}")


ATTACKS = (
    Attack("4 endless headers", _send_endless_headers),
    Attack("4 long URL", partial(_send_endlessly, begin=b"GET /")),
    Attack("4 many connections", _open_many_connections),
    Attack("4 slow headers", _send_slow_headers, settings=QUICK),
    Attack("4 slow bodies", _send_slow_bodies, settings=QUICK),
)
