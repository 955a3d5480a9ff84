"""The relay between TCP connections and a unix socket: all bytes, in order, no faster than they are read."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from benchmarks.waiting import until
from penstock.gateway.native_grpc.relay import PREFACE, Relay

WAIT_S = 20.0
MIB = 1024 * 1024
FIRST = b"the server speaks first"


class FakeNative:
    """A server that reads the preface, sends a greeting, and then echoes what it receives unless the test pauses it."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.heard_bytes = 0
        self.ended = 0

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        await self.may_read.wait()
        return await reader.read(65536)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            assert await reader.readexactly(len(PREFACE)) == PREFACE
            writer.write(FIRST)
            while data := await self._read(reader):
                self.heard_bytes += len(data)
                if data == b"go away":
                    break
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended += 1
            writer.close()


class Endpoint:
    def __init__(self, native: FakeNative, relay: Relay, port: int) -> None:
        self.native, self.relay, self.port = native, relay, port

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(PREFACE)
            assert await reader.readexactly(len(FIRST)) == FIRST
            try:
                yield reader, writer
            finally:
                writer.transport.abort()
                with suppress(ConnectionError):
                    await writer.wait_closed()


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    native, relay = FakeNative(), Relay(tmp_path / "native", 100)
    server = await asyncio.start_unix_server(native.serve, tmp_path / "native")
    port = await relay.open("127.0.0.1", 0, is_port_shared=False, last_number=41)
    yield Endpoint(native, relay, port)
    relay.stop_listening()
    await relay.close(0.1)
    server.close()
    await asyncio.sleep(0.05)  # what was closed ends a turn of the loop later


async def test_bytes_are_relayed_and_clients_are_known_by_connection_number(endpoint: Endpoint) -> None:
    async with endpoint.connection() as (reader, writer), endpoint.connection() as (second_reader, second):
        writer.write(b"one")
        second.write(b"two")
        assert (await reader.readexactly(3), await second_reader.readexactly(3)) == (b"one", b"two")
        names = [f"ipv4:127.0.0.1:{each.get_extra_info('sockname')[1]}" for each in (writer, second)]
        assert endpoint.relay.peers == {"unix:42": names[0], "unix:43": names[1]}
    await until(lambda: not endpoint.relay.peers and endpoint.native.ended == 2)


@pytest.mark.parametrize("is_native_slow", [True, False])
async def test_nothing_is_lost_and_little_is_buffered_if_one_side_does_not_read(
    endpoint: Endpoint, is_native_slow: bool
) -> None:
    data = np.arange(16 * MIB, dtype=np.uint32).tobytes()
    if is_native_slow:
        endpoint.native.may_read.clear()
    async with endpoint.connection() as (reader, writer):
        writer.write(data)
        seen = -1
        while seen != (left := writer.transport.get_write_buffer_size()):
            seen = left
            await asyncio.sleep(0.1)
        assert left > len(data) // 3, "no process buffers more than the sockets"
        endpoint.native.may_read.set()
        assert await reader.readexactly(len(data)) == data


async def test_closing_one_side_closes_the_other(endpoint: Endpoint) -> None:
    async with endpoint.connection() as (reader, writer):
        writer.write(b"go away")
        assert await reader.read() == b""
    async with endpoint.connection() as (_, writer):
        writer.close()
        await until(lambda: endpoint.native.ended == 2)
    await until(lambda: not endpoint.relay.peers)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", PREFACE[:10] + b"1.0\r\n"])
async def test_clients_that_do_not_speak_http2_are_disconnected(endpoint: Endpoint, first: bytes) -> None:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(first)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    await until(lambda: not endpoint.relay.peers and endpoint.native.ended == 1)
    assert endpoint.native.heard_bytes == 0


async def test_connections_beyond_the_limit_are_closed_at_once(tmp_path: Path) -> None:
    native, relay = FakeNative(), Relay(tmp_path / "native", 3)
    server = await asyncio.start_unix_server(native.serve, tmp_path / "native")
    port = await relay.open("127.0.0.1", 0, is_port_shared=False, last_number=0)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    async with asyncio.timeout(WAIT_S):
        assert [await reader.read() for reader, _ in opened[3:]] == [b"", b""]
    assert len(relay.peers) == 3
    opened[0][1].transport.abort()
    await until(lambda: len(relay.peers) == 2)
    opened.append(await asyncio.open_connection("127.0.0.1", port))
    await until(lambda: len(relay.peers) == 3)
    for _, writer in opened:
        writer.transport.abort()
    relay.stop_listening()
    await relay.close(0.1)
    server.close()
    await asyncio.sleep(0.05)


async def test_a_disconnect_during_an_answer_releases_everything(endpoint: Endpoint) -> None:
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    for _ in range(20):
        async with endpoint.connection() as (_, writer):
            writer.write(bytes(MIB))
            await until(lambda: endpoint.native.heard_bytes > MIB // 2)
            endpoint.native.heard_bytes = 0
    await until(lambda: not endpoint.relay.peers)
    assert wrong == []


async def test_a_closed_target_closes_its_source(tmp_path: Path) -> None:
    relay = Relay(tmp_path / "native", 100)
    with socket.socket(socket.AF_UNIX) as native:
        native.bind(str(tmp_path / "native"))
        native.listen()
        port = await relay.open("127.0.0.1", 0, is_port_shared=False, last_number=0)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: bool(relay.peers))
        taken, _ = native.accept()
        taken.shutdown(socket.SHUT_RD)
        wrong: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
        writer.write(PREFACE)
        await until(lambda: not relay.peers)
        taken.close()
        writer.transport.abort()
    relay.stop_listening()
    await relay.close(0.1)
    await asyncio.sleep(0.05)
    assert wrong == []


async def test_connections_are_refused_if_the_native_server_is_gone(tmp_path: Path) -> None:
    relay = Relay(tmp_path / "none", 100)
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


async def test_last_answers_are_relayed_before_all_connections_close(endpoint: Endpoint) -> None:
    async with endpoint.connection() as (reader, writer):
        writer.write(b"last")
        await until(lambda: endpoint.native.heard_bytes == 4)
        endpoint.relay.stop_listening()
        await endpoint.relay.close(0.2)
        assert await reader.read(4) == b"last"
        with suppress(ConnectionError):
            assert await reader.read(1) == b""
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", endpoint.port)
