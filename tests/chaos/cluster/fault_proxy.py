"""A proxy between a client and a server that counts bytes and cuts connections."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

PIECE_BYTES = 64 * 1024
AWAY_S = 0.5  # time after a cut in which no connection is accepted


class FaultProxy:
    """A context manager for the proxy. Cuts all connections when the bytes sent to the server reach each of `cuts`."""

    def __init__(self, port: int, cuts: Sequence[int] = ()) -> None:
        self._to = port
        self._cuts = sorted(cuts)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._away_until = 0.0
        self._server: asyncio.Server | None = None
        self.sent_bytes = 0  # number of bytes
        self.received_bytes = 0
        self.cut_count = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> "FaultProxy":
        self._server = await asyncio.start_server(self._handle_connection, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset all open connections."""
        self.cut_count += 1
        self._away_until = asyncio.get_running_loop().time() + AWAY_S
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asyncio.get_running_loop().time() < self._away_until:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, there_writer}
        for coroutine in (self._forward(reader, there_writer, True), self._forward(there_reader, writer, False)):
            task = asyncio.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_up: bool) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                writer.write(piece)
                await writer.drain()
                if is_up:
                    self.sent_bytes += len(piece)
                else:
                    self.received_bytes += len(piece)
                if self._cuts and self.sent_bytes + self.received_bytes >= self._cuts[0]:
                    self._cuts.pop(0)
                    self.cut()
        self._writers.discard(writer)
        writer.transport.abort()
