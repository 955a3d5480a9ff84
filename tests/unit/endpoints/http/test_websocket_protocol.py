"""WebSocket connections whose messages are not read, silent peers, and floods of small frames."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn
from websockets.asyncio.client import connect

from benchmarks.waiting import until
from penstock.core.config import Limits
from penstock.endpoints.connection_limits import ConnectionLimits
from penstock.endpoints.http.websocket_protocol import MAX_CONTROL_FRAMES, MAX_FREE_FRAGMENTS, StreamProtocol
from penstock.serving.admission import Admission

WAIT_S = 10.0
PING_S = 0.05
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
CONNECTION_LIMITS = ConnectionLimits(Limits(), Admission(Limits()), lambda error: None, 100)
App = Callable[..., Awaitable[None]]


@asynccontextmanager
async def serving(
    app: App, ping_s: float = PING_S, connection_limits: ConnectionLimits = CONNECTION_LIMITS
) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app,
        loop="none",
        lifespan="off",
        log_config=None,
        ws=cast(type[asyncio.Protocol], partial(StreamProtocol, connection_limits)),
        ws_ping_interval=ping_s,
        ws_ping_timeout=2 * ping_s,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        yield int(listening.getsockname()[1])
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_S)


async def echo_after(pause_s: float, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    await asyncio.sleep(pause_s)
    while (event := await receive())["type"] != "websocket.disconnect":
        await send({"type": "websocket.send", "text": event["text"]})


async def test_a_connection_with_a_full_window_is_not_closed_for_a_missing_pong() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo_after(12 * PING_S, receive, send)

    async with serving(app) as port, connect(f"ws://127.0.0.1:{port}", proxy=None, ping_interval=None) as connection:
        for number in range(3):
            await connection.send(str(number))
        async with asyncio.timeout(WAIT_S):
            assert [await connection.recv() for _ in range(3)] == ["0", "1", "2"]


async def test_a_silent_connection_is_closed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo_after(0.0, receive, send)

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HANDSHAKE)
        async with asyncio.timeout(WAIT_S):
            heard = await reader.read()
        writer.close()
    assert heard.startswith(b"HTTP/1.1 101 ")
    assert heard.endswith((1011).to_bytes(2, "big") + b"keepalive ping timeout")


async def test_an_invalid_handshake_gets_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing is to be served")

    broken = [
        HANDSHAKE.replace(b"GET ", b"POST "),
        HANDSHAKE.replace(b"sec-websocket-key", b"key"),
        HANDSHAKE.replace(b"host: x", b"host: x\r\nx-strange: \x80\x01"),
        HANDSHAKE.replace(b"GET / ", b"GET /\xe9 "),
        HANDSHAKE.replace(b"host: x", b"\r\n".join(b"x-%d: y" % number for number in range(1000))),
    ]
    async with serving(app) as port:
        for message in broken:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(message)
            async with asyncio.timeout(WAIT_S):
                heard = await reader.read()
            assert heard.startswith(b"HTTP/1.1 4"), (message[:200], heard[:200])
            is_no_http = b"Invalid HTTP request" in heard  # the protocol received none of the handshake
            assert is_no_http or b'{"error":' in heard, heard[:500]
            writer.close()


def encode_frame(opcode: int, data: bytes = b"", is_final: bool = True) -> bytes:
    """Return a short frame of a client, with a mask of zeros."""
    return bytes([opcode | (0x80 if is_final else 0), 0x80 | len(data)]) + bytes(4) + data


FRAGMENT, TEXT, PING, PONG = 0, 1, 9, 10
FLOODS = {
    "fragments": (encode_frame(TEXT, b"a", is_final=False), encode_frame(FRAGMENT, b"a", is_final=False)),
    "empty fragments": (encode_frame(TEXT, is_final=False), encode_frame(FRAGMENT, is_final=False)),
    "pings": (b"", encode_frame(PING, b"are you there?")),
    "pongs": (b"", encode_frame(PONG)),
}


async def test_floods_of_small_frames_end_the_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo_after(0.0, receive, send)

    async def flood(port: int, frames: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frames)
        heard = b""
        with suppress(ConnectionError):
            while part := await reader.read(65536):
                heard += part
        writer.close()
        return heard

    async with serving(app) as port, asyncio.timeout(WAIT_S):
        few = await asyncio.gather(*(flood(port, first + more * 80) for first, more in FLOODS.values()))
        many = await asyncio.gather(*(flood(port, first + more * 20_000) for first, more in FLOODS.values()))
    for what, answer in zip(FLOODS, few, strict=True):
        assert (1008).to_bytes(2, "big") in answer, what
    for answer in many:  # a client that does not read may not receive the reason
        assert answer.count(b"are you there?") < 1000


async def test_usual_numbers_of_fragments_and_pings_are_accepted() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo_after(0.0, receive, send)

    async with serving(app, WAIT_S) as port, connect(f"ws://127.0.0.1:{port}", proxy=None, max_size=None) as connection:
        async with asyncio.timeout(WAIT_S):
            await connection.send(["a"] * MAX_FREE_FRAGMENTS)
            assert await connection.recv() == "a" * MAX_FREE_FRAGMENTS
            await connection.send(["a" * 16_384] * 1000)
            assert len(await connection.recv()) == 16_384_000
            for _ in range(MAX_CONTROL_FRAMES // 2):
                await (await connection.ping())


async def test_messages_are_parsed_only_after_earlier_ones_were_read() -> None:
    waiting: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        queue = receive.__self__.queue
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(20_000):
            assert (await receive())["type"] == "websocket.receive"
            waiting.append(queue.qsize())
        await send({"type": "websocket.close"})

    async with serving(app, WAIT_S) as port, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(encode_frame(TEXT) * 20_000)
        await reader.read(1)
        writer.close()
    assert len(waiting) == 20_000
    assert max(waiting) < 2000


async def test_incomplete_messages_of_all_connections_are_bounded() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo_after(0.0, receive, send)

    def begun(size: int) -> bytes:
        """Return the first bytes of a text of 900,000 bytes."""
        return bytes([0x80 | TEXT, 0x80 | 127]) + (900_000).to_bytes(8, "big") + bytes(4) + b"a" * size

    admission = Admission(Limits(max_message_bytes=1024, max_inflight_bytes=1024))
    few = ConnectionLimits(admission.limits, admission, lambda error: None, 100)
    assert admission.incoming.max_bytes < 2_000_000
    async with serving(app, WAIT_S, few) as port, asyncio.timeout(WAIT_S):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in clients:
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(begun(700_000))
            await until(lambda: admission.incoming.bytes >= 600_000, "most of the message has arrived")
        heard = await clients[0][0].read()  # the connection that has held bytes longest is closed
        assert (1013).to_bytes(2, "big") + b"too many bytes" in heard
        reader, writer = clients[1]
        writer.write(b"a" * 200_000)
        answer = await reader.readexactly(900_000)
        assert answer.endswith(b"a" * 1000)
        assert admission.incoming.bytes == 0
        for _, writer in clients:
            writer.close()
