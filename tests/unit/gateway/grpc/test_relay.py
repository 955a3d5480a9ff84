"""Connections that are carried to a unix socket and back: all of it, in order, no faster than it is taken."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from benchmarks.waiting import until
from penstock.gateway.grpc.relay import Relay

WAIT_S = 20.0
MIB = 1024 * 1024
FIRST = b"the front speaks first"


class Front:
    """Greets, and says again what it hears, when it is let."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.heard_bytes = 0
        self.ended = 0

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        await self.may_read.wait()
        return await reader.read(65536)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FIRST)
        try:
            while data := await self._read(reader):
                self.heard_bytes += len(data)
                if data == b"go away":
                    break
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.ended += 1
            writer.close()


class Door:
    def __init__(self, front: Front, relay: Relay, port: int) -> None:
        self.front, self.relay, self.port = front, relay, port

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            assert await reader.readexactly(len(FIRST)) == FIRST
            try:
                yield reader, writer
            finally:
                writer.transport.abort()
                with suppress(ConnectionError):
                    await writer.wait_closed()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    front, relay = Front(), Relay(tmp_path / "front")
    server = await asyncio.start_unix_server(front.serve, tmp_path / "front")
    port = await relay.open("127.0.0.1", 0, is_port_shared=False, last_number=41)
    yield Door(front, relay, port)
    relay.stop_listening()
    await relay.close(0.1)
    server.close()
    await asyncio.sleep(0.05)  # what was closed ends a turn of the loop later


async def test_what_comes_goes_to_the_other_side_and_clients_are_known_by_number(door: Door) -> None:
    async with door.connection() as (reader, writer), door.connection() as (second_reader, second):
        writer.write(b"one")
        second.write(b"two")
        assert (await reader.readexactly(3), await second_reader.readexactly(3)) == (b"one", b"two")
        names = [f"ipv4:127.0.0.1:{each.get_extra_info('sockname')[1]}" for each in (writer, second)]
        assert door.relay.peers == {"unix:42": names[0], "unix:43": names[1]}
    await until(lambda: not door.relay.peers and door.front.ended == 2)


@pytest.mark.parametrize("is_front_slow", [True, False])
async def test_nothing_is_lost_and_little_is_held_where_one_side_does_not_read(door: Door, is_front_slow: bool) -> None:
    data = np.arange(16 * MIB, dtype=np.uint32).tobytes()
    if is_front_slow:
        door.front.may_read.clear()
    async with door.connection() as (reader, writer):
        writer.write(data)
        seen = -1
        while seen != (left := writer.transport.get_write_buffer_size()):
            seen = left
            await asyncio.sleep(0.1)
        assert left > len(data) // 3, "the sockets hold the rest, and nobody more"
        door.front.may_read.set()
        assert await reader.readexactly(len(data)) == data


async def test_an_end_on_either_side_is_one_on_the_other(door: Door) -> None:
    async with door.connection() as (reader, writer):
        writer.write(b"go away")
        assert await reader.read() == b""
    async with door.connection() as (_, writer):
        writer.close()
        await until(lambda: door.front.ended == 2)
    await until(lambda: not door.relay.peers)


async def test_one_who_leaves_while_it_is_spoken_to_leaves_nothing_behind(door: Door) -> None:
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    for _ in range(20):
        async with door.connection() as (_, writer):
            writer.write(bytes(MIB))
            await until(lambda: door.front.heard_bytes > MIB // 2)
            door.front.heard_bytes = 0
    await until(lambda: not door.relay.peers)
    assert wrong == []


async def test_a_target_that_is_gone_is_the_end_of_its_source(tmp_path: Path) -> None:
    relay = Relay(tmp_path / "front")
    with socket.socket(socket.AF_UNIX) as front:
        front.bind(str(tmp_path / "front"))
        front.listen()
        port = await relay.open("127.0.0.1", 0, is_port_shared=False, last_number=0)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: bool(relay.peers))
        taken, _ = front.accept()
        taken.shutdown(socket.SHUT_RD)
        wrong: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
        writer.write(b"to nobody")
        await until(lambda: not relay.peers)
        taken.close()
        writer.transport.abort()
    relay.stop_listening()
    await relay.close(0.1)
    await asyncio.sleep(0.05)
    assert wrong == []


async def test_who_comes_when_the_front_has_gone_is_turned_away(tmp_path: Path) -> None:
    relay = Relay(tmp_path / "none")
    port = await relay.open("127.0.0.1", 0, is_port_shared=False, last_number=0)
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            assert await reader.read(1) == b""
        writer.close()
    relay.stop_listening()
    await relay.close(0.1)
    await asyncio.sleep(0.05)
    assert relay.peers == {}


async def test_last_words_are_carried_and_then_all_connections_end(door: Door) -> None:
    async with door.connection() as (reader, writer):
        writer.write(b"last")
        await until(lambda: door.front.heard_bytes == 4)
        door.relay.stop_listening()
        await door.relay.close(0.2)
        assert await reader.read(4) == b"last"
        with suppress(ConnectionError):
            assert await reader.read(1) == b""
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", door.port)
