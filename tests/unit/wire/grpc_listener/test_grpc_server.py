"""A gRPC server answers calls of unknown methods without affecting others; the private parts of grpc.aio in use."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from penstock.wire.grpc_listener.grpc_server import GRPC_LOGGER, grpc_server
from tests.hpack_bomb import send_bomb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, END_STREAM, END_HEADERS = 1, 4, 1, 4
BOMB_BYTES = 48 * 1024 * 1024  # of each connection


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


async def call_raw(port: int, path: bytes) -> bytes:
    """Call a method that no client library would call; return the received bytes up to the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"here", b"te": b"trailers"}
    asked[b"content-type"] = b"application/grpc"
    fields = b"".join(header(name, value) for name, value in asked.items())
    writer.write(PREFACE + encode_frame(SETTINGS, 0, 0) + encode_frame(HEADERS, END_STREAM | END_HEADERS, 1, fields))
    try:
        return await asyncio.wait_for(reader.readuntil(b"Method not found!"), 20)
    finally:
        writer.transport.abort()


async def _answer(messages: object, context: Any) -> bytes:
    return bytes(await context.read())


@pytest.mark.parametrize("path", [b"\xff\xfe", b"/a.B/\xc3", b"/a.B/other", b"", b"/"])
async def test_a_call_of_an_unknown_method_is_answered_and_ends_nothing(path: bytes) -> None:
    server = grpc_server()
    server.add_registered_method_handlers("a.B", {"Echo": grpc.stream_unary_rpc_method_handler(_answer)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            echo = channel.unary_unary("/a.B/Echo")
            assert await echo(b"before", timeout=20) == b"before"
            assert b"grpc-status" in await call_raw(port, path)
            assert await echo(b"after", timeout=20) == b"after"
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_unary("/a.B/Nothing")(b"", timeout=20)
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(None)


async def test_connections_whose_headers_fill_the_memory_are_cut() -> None:
    server = grpc_server()
    server.add_registered_method_handlers("a.B", {"Echo": grpc.stream_unary_rpc_method_handler(_answer)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            echo = channel.unary_unary("/a.B/Echo")
            assert await echo(b"before", timeout=60) == b"before"
            cut = await asyncio.gather(*(send_bomb(port, BOMB_BYTES) for _ in range(4)))
            assert all(cut), cut
            assert await echo(b"after", timeout=60) == b"after"
    finally:
        await server.stop(None)


def test_the_private_parts_of_grpc_aio_exist() -> None:
    assert all(hasattr(cygrpc, name) for name in ("_MethodResolver", "_handle_rpc", "_schedule_rpc_coro"))
    assert hasattr(cygrpc.AioServer, "_request_call")
    assert cygrpc._LOGGER.name == GRPC_LOGGER
