"""Sends malformed messages over HTTP."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from random import Random

from tests.chaos.answers import HANG_S, AttackAnswers
from tests.chaos.http_messages import (
    HttpMessage,
    draw_wrong_header,
    draw_wrong_json,
    generate_messages,
    list_openapi_messages,
    list_valid_messages,
)
from tests.chaos.mutation import draw_examples, mutate

CONNECTIONS = 8
CLOSED = 0  # in place of a status: the server closed the connection without an answer


class Connection:
    """A persistent connection, which is opened again if the server has closed it."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, raw: bytes, is_last: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body.

        `is_last` means that nothing follows, for messages whose length may be wrong.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._streams
        try:
            writer.write(raw)
            if is_last:
                writer.write_eof()
            answer = await _read_answer(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            return CLOSED, {}, b""
        except BaseException:
            await self.close()
            raise
        if is_last or answer[1].get("connection") == "close":
            await self.close()
        return answer

    async def close(self) -> None:
        if self._streams is not None:
            writer = self._streams[1]
            self._streams = None
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


class RestAttack:
    def __init__(self, address: str, page: dict[str, object], count: int, seed: int) -> None:
        self.answers = AttackAnswers()
        self._address = address
        self._rng = Random(seed)
        seeds = [
            *list_openapi_messages(page, count // 3, seed),
            *draw_examples(draw_wrong_json(), count // 3, seed),
            *draw_examples(draw_wrong_header(), count // 3, seed),
        ]
        self._messages = generate_messages(seeds, self._rng)
        self._raw = [message.encode() for message in list_valid_messages()]

    async def send(self, count: int) -> None:
        """Send `count` requests, a tenth of which are not even HTTP."""
        garbage = count // 10
        numbers = iter(range(count - garbage))
        await asyncio.gather(*(self._ask_all(numbers) for _ in range(CONNECTIONS)))
        for _ in range(garbage):
            await self._send_garbage()

    async def _ask_all(self, numbers: Iterator[int]) -> None:
        connection = Connection(self._address)
        for _ in numbers:
            message = next(self._messages)
            try:
                async with asyncio.timeout(HANG_S):
                    status, headers, body = await connection.ask(message.encode())
            except TimeoutError:
                self.answers.record_hang("rest", message)
                continue
            self._judge(message, status, headers, body)
        await connection.close()

    def _judge(self, message: HttpMessage, status: int, headers: dict[str, str], body: bytes) -> None:
        is_engine = headers.get("penstock-code") == "engine_failed"
        if status == CLOSED or (status >= 500 and not is_engine and status not in (503, 504)):
            self.answers.record_crash(f"rest {status}", (message, body))
        elif status >= 400 and not _is_typed(body):
            self.answers.record_crash(f"rest {status} without an error", (message, body))
        else:
            self.answers.record_typed(f"rest {status}")

    async def _send_garbage(self) -> None:
        """Send a mutated request, head included; the answer must be 4xx or a closed connection."""
        raw = mutate(self._rng.choice(self._raw), self._rng, self._raw)
        connection = Connection(self._address)
        try:
            async with asyncio.timeout(HANG_S):
                status, _, body = await connection.ask(raw, is_last=True)
        except TimeoutError:
            self.answers.record_hang("http", raw)
            await connection.close()
            return
        if status >= 500:
            self.answers.record_crash(f"http {status}", (raw, body))
        else:
            self.answers.record_typed(f"http {status or 'closed'}")


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        if status != 100:
            break
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        return status, headers, await _read_chunks(reader)
    return status, headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


def _is_typed(body: bytes) -> bool:
    """Accept `{"error": "…"}`, or OpenAI's `{"error": {"message": "…", …}}`."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, str) or isinstance(error.get("message"), str)
