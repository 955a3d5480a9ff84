"""The load generator with its processes, as a user starts it."""

import asyncio
from pathlib import Path

from penstock.experiments.load.generator import OFFSET, Generator
from penstock.experiments.load.load_process import LoadSpec, Window, write_messages

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


async def test_each_process_starts_at_its_own_offset(tmp_path: Path) -> None:
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            asked.append(int(head.split()[1].removeprefix(b"/")))
            await reader.readline()
            writer.write(ANSWER)
        writer.close()

    messages = [b"POST /%d HTTP/1.1\r\n\r\n" % number for number in range(2 * OFFSET)]
    file = write_messages(tmp_path / "messages", messages)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    def load() -> int:
        with Generator(LoadSpec("rest", f"127.0.0.1:{port}", str(file), 2, first=7), processes=2) as generator:
            return generator.run(Window(0.2, rate=40.0)).sent

    async with server:
        sent = await asyncio.to_thread(load)
    assert len(asked) == sent
    begun = [min(one for one in asked if one >= first) for first in (0, OFFSET)]
    assert begun == [7, 7 + OFFSET]
