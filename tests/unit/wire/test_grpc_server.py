"""Calls of methods that are not there: answered, and nobody else's matter."""

import asyncio
from typing import Any

import grpc
import pytest

from penstock.wire.grpc_server import grpc_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, END_STREAM, END_HEADERS = 1, 4, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


async def call_raw(port: int, path: bytes) -> bytes:
    """A call of a method that no client library would send; returns what is heard up to its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"here", b"te": b"trailers"}
    asked[b"content-type"] = b"application/grpc"
    fields = b"".join(header(name, value) for name, value in asked.items())
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_STREAM | END_HEADERS, 1, fields))
    try:
        return await asyncio.wait_for(reader.readuntil(b"Method not found!"), 20)
    finally:
        writer.transport.abort()


async def _answer(messages: object, context: Any) -> bytes:
    return bytes(await context.read())


@pytest.mark.parametrize("path", [b"\xff\xfe", b"/a.B/\xc3", b"/a.B/other", b"", b"/"])
async def test_a_call_of_no_method_is_answered_and_ends_nothing(path: bytes) -> None:
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
