"""Raw streams against a small WebSocket server that answers as the test says."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from penstock.client.websocket import stream_raw
from penstock.core.errors import (
    DeadlineExceeded,
    InvalidImage,
    InvalidRequest,
    RequestTooLarge,
    Unavailable,
    UnknownModel,
)

WAIT_S = 10.0


class Server:
    """A server that echoes in capitals, and treats some words as commands."""

    def __init__(self) -> None:
        self.http = ""
        self.path = ""
        self.timeout = ""
        self.seen = 0
        self.has_left = asyncio.Event()

    async def answer(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.path = connection.request.path
        self.timeout = connection.request.headers["x-request-timeout-ms"]
        async for message in connection:
            self.seen += 1
            if message == b"bad":
                await connection.send(json.dumps({"error": "no image", "code": "invalid_image", "id": "1"}))
            elif message == b"large":
                await connection.close(1009)
            elif message == b"bye":
                await connection.close(1001, "going away")
            elif message != b"silence":
                assert isinstance(message, bytes)
                await connection.send(message.upper())
        self.has_left.set()

    def refuse(self, connection: ServerConnection, request: Request) -> Response | None:
        if "/nobody/" in request.path:
            refusal = connection.respond(404, json.dumps({"error": "unknown model 'nobody'"}))
            refusal.headers["penstock-code"] = "unknown_model"
            return refusal
        if "/strange/" in request.path:
            return connection.respond(418, "tea")
        return None


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with serve(made.answer, "127.0.0.1", 0, process_request=made.refuse) as listening:
        made.http = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield made


async def frames(*words: bytes) -> AsyncIterator[bytes]:
    for word in words:
        yield word


async def ask(server: Server, *words: bytes, model: str = "m", timeout_s: float = WAIT_S) -> list[object]:
    async with asyncio.timeout(WAIT_S):
        stream = stream_raw(frames(*words), model, server.http, ("in", "out"), window=2, timeout_s=timeout_s)
        return [answer async for answer in stream]


async def test_answers_come_in_order(server: Server) -> None:
    words = [f"w{number}".encode() for number in range(20)]
    assert await ask(server, *words, model="a/b") == [word.upper() for word in words]
    assert server.path == "/v2/models/a%2Fb/stream?input=in&output=out"
    assert server.timeout == "10000"


async def test_one_failed_frame_ends_nothing(server: Server) -> None:
    first, second, third = await ask(server, b"a", b"bad", b"c")
    assert (first, third) == (b"A", b"C")
    assert isinstance(second, InvalidImage)
    assert second.message == "no image"


async def test_no_more_frames_are_in_flight_than_the_window_allows(server: Server) -> None:
    async with asyncio.timeout(WAIT_S):
        stream = stream_raw(frames(*[b"x"] * 100), "m", server.http, window=3)
        assert await anext(stream) == b"X"
        await asyncio.sleep(0.05)
        assert server.seen == 3
        assert await anext(stream) == b"X"
        await stream.aclose()
        await server.has_left.wait()


@pytest.mark.parametrize(
    ("words", "error"),
    [([b"large"], RequestTooLarge), ([b"a", b"bye"], Unavailable)],
)
async def test_a_stream_that_the_server_ends_raises_an_error(
    server: Server, words: list[bytes], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await ask(server, *words)


async def test_a_missing_answer_times_out(server: Server) -> None:
    with pytest.raises(DeadlineExceeded):
        await ask(server, b"silence", timeout_s=0.05)


async def test_a_refused_handshake_is_reported(server: Server) -> None:
    with pytest.raises(UnknownModel, match="unknown model 'nobody'"):
        await ask(server, b"x", model="nobody")
    with pytest.raises(InvalidRequest, match="HTTP 418"):
        await ask(server, b"x", model="strange")


async def test_an_unreachable_server_is_reported() -> None:
    nowhere = Server()
    nowhere.http = "127.0.0.1:1"
    with pytest.raises(Unavailable, match="is `penstock serve` running at"):
        await ask(nowhere, b"x")


async def test_a_failing_source_of_frames_ends_the_stream(server: Server) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise InvalidRequest("b.png: cannot be read")

    answers = stream_raw(broken(), "m", server.http)
    assert await anext(answers) == b"A"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await anext(answers)
