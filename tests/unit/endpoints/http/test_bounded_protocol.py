"""HTTP connections that exceed limits: they get an error if possible, and are closed."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from penstock.core.config import Config, Limits
from penstock.endpoints.guard import create_open_guard
from penstock.endpoints.http.bounded_protocol import MAX_PIPELINED
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.gateway.http_app import HttpApp, build_http_app, create_http_server
from penstock.serving.admission import Admission
from penstock.wire.credentials.certificates import Certificates
from tests.unit.conftest import Served

WAIT_S = 20.0
INFER = b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: localhost\r\n"
BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
PLAIN = INFER + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def running(app: HttpApp, limits: Limits) -> AsyncIterator[tuple[Connect, Admission]]:
    admission = Admission(limits)
    server = create_http_server(app, limits, admission, Certificates())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[listening]))
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return reader, writer

        try:
            async with asyncio.timeout(WAIT_S):
                yield connect, admission
        finally:
            for writer in writers:
                writer.transport.abort()
            server.should_exit = True
            await asyncio.wait_for(task, WAIT_S)


def app_within(served: Served, limits: Limits) -> HttpApp:
    serving: Any = served.serving
    return build_http_app(
        serving, served.catalogue, limits, lambda: served.registry, HttpGuard(Config(), create_open_guard())
    )


async def answer_to(connect: Connect, *parts: bytes) -> bytes:
    """Return everything received until the server closes the connection."""
    reader, writer = await connect()
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.02)
    return await reader.read()


HEADERS = {
    "one long value": (INFER + b"x: " + b"a" * 70_000 + b"\r\n\r\n",),
    "a value without an end": tuple([INFER + b"x: "] + [b"a" * 40_000] * 4),
    "a long address": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",),
    "an address without an end": tuple([b"GET /"] + [b"a" * 40_000] * 4),
    "many short ones": (INFER + b"a: b\r\n" * 300 + b"\r\n",),
}


async def test_headers_over_a_limit_are_refused(served: Served) -> None:
    limits = Limits()
    async with running(app_within(served, limits), limits) as (connect, _):
        heard = await asyncio.gather(*(answer_to(connect, *parts) for parts in HEADERS.values()))
    for what, answer in zip(HEADERS, heard, strict=True):
        assert answer.startswith(b"HTTP/1.1 431 "), what
        assert b"penstock-code: headers_too_large\r\n" in answer


async def test_bodies_and_further_requests_do_not_count_as_headers(served: Served) -> None:
    limits = Limits()
    long = INFER + b"content-length: 300000\r\n\r\n" + b" " * 300_000
    async with running(app_within(served, limits), limits) as (connect, admission):
        reader, writer = await connect()
        for _ in range(3):
            writer.write(long + PLAIN[:50])
            await asyncio.sleep(0.02)
            writer.write(PLAIN[50:] + LIVE)
        heard = b""
        while heard.count(b"HTTP/1.1 ") < 9:
            heard += await reader.read(65536)
        assert admission.incoming.bytes == 0
    assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [b"400", b"200", b"200"] * 3


async def test_tiny_chunks_and_too_many_trailers_are_refused(served: Served) -> None:
    limits = Limits()
    chunked = INFER + b"transfer-encoding: chunked\r\n\r\n"
    async with running(app_within(served, limits), limits) as (connect, _):
        tiny = await answer_to(connect, chunked, *([b"1\r\na\r\n" * 10_000] * 6))
        extended = await answer_to(connect, chunked, *([b"1;" + b"x" * 30_000 + b"\r\na\r\n"] * 4))
        trailers = await answer_to(connect, chunked + b"1\r\na\r\n0\r\n", *([b"a: b\r\n" * 1000] * 12))
        reader, writer = await connect()
        writer.write(chunked + b"2\r\n{}\r\n0\r\na: b\r\n\r\n")
        whole = await reader.readuntil(b"}")
    assert tiny.startswith(b"HTTP/1.1 400 ")
    assert extended.startswith(b"HTTP/1.1 400 ")
    assert trailers.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert b"inputs" in whole


SLOW = {
    "headers": (INFER[:30],),
    "a small body": (PLAIN[:-10],),
    "a large body": (INFER + b"content-length: 300000\r\n\r\n" + b" " * 200_000,),
    "a chunked body": (INFER + b"transfer-encoding: chunked\r\n\r\n5\r\nab",),
    "a body of another route": (b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",),
    "headers after an answer": (PLAIN, INFER[:30]),
}


async def test_requests_that_stop_arriving_are_refused(served: Served) -> None:
    limits = Limits(header_timeout_s=0.2, body_timeout_s=0.2)
    async with running(app_within(served, limits), limits) as (connect, admission):
        heard = await asyncio.gather(*(answer_to(connect, *parts) for parts in SLOW.values()))
        assert admission.incoming.bytes == 0
    for what, answers in zip(SLOW, heard, strict=True):
        last = answers[answers.rindex(b"HTTP/1.1 ") :]
        assert last.startswith(b"HTTP/1.1 408 "), what
        assert b"penstock-code: too_slow\r\n" in last


async def test_a_slow_body_is_refused_after_the_message_timeout(served: Served) -> None:
    limits = Limits(body_timeout_s=5, message_timeout_s=0.5)
    async with running(app_within(served, limits), limits) as (connect, _):
        reader, writer = await connect()
        writer.write(INFER + b"content-length: 1000\r\n\r\n")
        heard = asyncio.create_task(reader.read())
        while not heard.done():
            writer.write(b" ")
            await asyncio.sleep(0.1)
    assert (await heard).startswith(b"HTTP/1.1 408 ")


async def test_idle_connections_are_closed(served: Served) -> None:
    limits = Limits(idle_timeout_s=0.2)
    async with running(app_within(served, limits), limits) as (connect, _):
        said = [(), (PLAIN,), (LIVE,)]
        heard = await asyncio.gather(*(answer_to(connect, *parts) for parts in said))
    assert [answer[:12] for answer in heard] == [b"", b"HTTP/1.1 200", b"HTTP/1.1 200"]


async def test_connections_are_limited_in_all_and_per_address(served: Served) -> None:
    limits = Limits(max_connections=5, client_share=0.8)
    async with running(app_within(served, limits), limits) as (connect, _):
        inside = [await connect() for _ in range(4)]
        for _, writer in inside:
            writer.write(LIVE)
        assert {await reader.readline() for reader, _ in inside} == {b"HTTP/1.1 200 OK\r\n"}
        refused = await answer_to(connect)
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"penstock-code: overloaded\r\n" in refused
        inside[0][1].close()
        await asyncio.sleep(0.1)
        reader, writer = await connect()
        writer.write(LIVE)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_the_longest_running_body_is_refused_when_memory_is_full(served: Served) -> None:
    limits = Limits(max_message_bytes=1_000_000, max_inflight_bytes=1_000_000)
    begun = INFER + b"content-length: 950000\r\n\r\n" + b" " * 900_000
    async with running(app_within(served, limits), limits) as (connect, admission):
        slow = [await connect() for _ in range(2)]
        for _, writer in slow:
            writer.write(begun)
            await asyncio.sleep(0.1)
        assert admission.incoming.bytes >= 1_800_000
        reader, writer = await connect()
        writer.write(begun)
        assert (await slow[0][0].read()).startswith(b"HTTP/1.1 429 ")
        for each in (slow[1][1], writer):
            each.write(b" " * 50_000)
        assert (await slow[1][0].readline()).startswith(b"HTTP/1.1 400 ")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        assert admission.incoming.bytes == 0


async def test_too_many_pipelined_requests_are_refused(served: Served) -> None:
    limits = Limits()
    async with running(app_within(served, limits), limits) as (connect, _):
        heard = await answer_to(connect, LIVE * (4 * MAX_PIPELINED))
    assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [b"200"] * (MAX_PIPELINED + 1) + [b"429"]


REFUSED_LATER = {
    "no request": (b"\x00\x01 is no request\r\n\r\n", b"400"),
    "headers that are too long": (INFER + b"x: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
    "a body that stops coming": (INFER + b"content-length: 300000\r\n\r\n" + b" " * 200_000, b"408"),
    "chunks that are none": (INFER + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", b"400"),
}


@pytest.mark.parametrize("before", [PLAIN, LIVE, PLAIN + LIVE + PLAIN], ids=["short way", "usual way", "both"])
async def test_requests_before_a_refused_one_are_answered(served: Served, before: bytes) -> None:
    limits = Limits(body_timeout_s=0.2)
    async with running(app_within(served, limits), limits) as (connect, admission):
        heard = await asyncio.gather(*(answer_to(connect, before + after) for after, _ in REFUSED_LATER.values()))
        assert admission.incoming.bytes == 0
    for (_, status), what, answers in zip(REFUSED_LATER.values(), REFUSED_LATER, heard, strict=True):
        assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * before.count(b"HTTP/1.1") + [status], what


class Answers:
    """An application with large answers, which is also the `infer` endpoint of its connections."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.infer: Any = self
        self.http_guard = HttpGuard(Config(), create_open_guard())

    def count_rejected(self, error: Exception) -> None:
        pass

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(self._size)})


async def test_connections_with_unread_answers_are_closed() -> None:
    app: Any = Answers(16 * 1024 * 1024)
    limits = Limits(answer_timeout_s=0.5)
    async with running(app, limits) as (connect, admission):
        reader, writer = await connect()
        writer.write(LIVE)
        await reader.readline()
        assert admission.unsent.bytes > 4 * 1024 * 1024
        while admission.unsent.bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        heard = 0
        with suppress(ConnectionError):
            while part := await reader.read(1024 * 1024):
                heard += len(part)
        assert heard < 16 * 1024 * 1024


async def test_the_slowest_reader_is_disconnected_when_memory_is_full() -> None:
    app: Any = Answers(16 * 1024 * 1024)
    limits = Limits(max_message_bytes=23 * 1024 * 1024, max_inflight_bytes=24 * 1024 * 1024)
    async with running(app, limits) as (connect, admission):
        connections = [await connect() for _ in range(3)]
        for reader, writer in connections:
            writer.write(LIVE)
            await reader.readline()
        assert admission.unsent.bytes < 24 * 1024 * 1024
        reader, _ = connections[-1]
        heard = 0
        while heard < 16 * 1024 * 1024:
            heard += len(await reader.read(1024 * 1024))
        assert admission.unsent.bytes == 0


async def test_trailers_are_not_headers(served: Served) -> None:
    limits = Limits()
    sent = INFER + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    trailers = b"host: evil.example\r\norigin: http://evil.example\r\ncontent-encoding: gzip\r\n\r\n"
    async with running(app_within(served, limits), limits) as (connect, _):
        heard = await answer_to(connect, sent + trailers + LIVE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [b"200", b"200"]


async def test_other_transfer_encodings_are_refused(served: Served) -> None:
    limits = Limits()
    async with running(app_within(served, limits), limits) as (connect, _):
        heard = await answer_to(connect, INFER + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + LIVE)
    assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [b"400"]
    assert b"only 'chunked' is supported" in heard


async def test_a_host_in_the_request_line_takes_precedence(served: Served) -> None:
    limits = Limits()
    async with running(app_within(served, limits), limits) as (connect, _):
        for place, status in ((b"evil.example", b"421"), (b"user@localhost", b"421"), (b"localhost", b"200")):
            asked = PLAIN.replace(b"POST ", b"POST http://" + place).replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
            heard = await answer_to(connect, asked)
            assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [status], place
