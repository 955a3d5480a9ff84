"""WebSocket connections whose messages are not read for a while, and peers that are silent for longer."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from websockets.asyncio.client import connect

from penstock.gateway.streams.websocket_protocol import StreamProtocol

WAIT_S = 10.0
PING_S = 0.05
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
App = Callable[..., Awaitable[None]]


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app,
        loop="none",
        lifespan="off",
        log_config=None,
        ws=StreamProtocol,
        ws_ping_interval=PING_S,
        ws_ping_timeout=2 * PING_S,
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


async def test_a_connection_that_is_not_read_is_not_taken_for_dead() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo_after(12 * PING_S, receive, send)

    async with serving(app) as port, connect(f"ws://127.0.0.1:{port}", proxy=None, ping_interval=None) as connection:
        for number in range(3):
            await connection.send(str(number))
        async with asyncio.timeout(WAIT_S):
            assert [await connection.recv() for _ in range(3)] == ["0", "1", "2"]


async def test_a_peer_that_gives_no_sign_of_life_is() -> None:
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


async def test_what_is_no_handshake_is_answered() -> None:
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
            writer.close()
