"""Large request bodies: when they wait for room, and what they take."""

import asyncio
from typing import Any

import pytest

from penstock.endpoints.held_bytes import COPIES, Room
from penstock.endpoints.http.bodies import wrap_large_body
from penstock.endpoints.large_messages import HUGE_BYTES

MOST = 64 * 1024 * 1024
WAIT_S = 10.0


def scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


class Sender:
    """A client that sends this many parts of half of HUGE_BYTES."""

    def __init__(self, parts: int) -> None:
        self.left = parts

    async def receive(self) -> dict[str, Any]:
        self.left -= 1
        return {"type": "http.request", "body": bytes(HUGE_BYTES // 2), "more_body": self.left > 0}


@pytest.mark.parametrize("headers", [{}, {"content_length": "0"}, {"content_length": str(HUGE_BYTES)}])
async def test_a_small_body_needs_no_room(headers: dict[str, str]) -> None:
    assert wrap_large_body(scope(**headers), Sender(1).receive, Room(MOST), MOST) is None


async def test_a_declared_body_waits_before_it_is_read() -> None:
    room, sender = Room(MOST), Sender(4)
    await room.take(MOST)
    body = wrap_large_body(scope(content_length=str(2 * HUGE_BYTES)), sender.receive, room, MOST)
    assert body is not None
    reading = asyncio.create_task(body())
    await asyncio.sleep(0)
    assert sender.left == 4
    room.give(MOST)
    await asyncio.wait_for(reading, WAIT_S)
    assert room.bytes == COPIES * 2 * HUGE_BYTES
    while sender.left:
        await body()
    body.release()
    assert room.bytes == 0


async def test_a_body_of_unknown_size_waits_when_it_becomes_large() -> None:
    room, sender = Room(4 * MOST), Sender(5)
    body = wrap_large_body(scope(transfer_encoding="chunked"), sender.receive, room, MOST)
    assert body is not None
    await body()
    await body()
    assert room.bytes == 0
    await body()
    assert room.bytes == COPIES * MOST
    await body()
    await body()
    assert room.bytes == COPIES * 5 * HUGE_BYTES // 2
    body.release()
    assert room.bytes == 0


async def test_no_body_takes_more_room_than_the_largest_message() -> None:
    room = Room(4 * MOST)
    body = wrap_large_body(scope(content_length="9" * 40), Sender(2).receive, room, MOST)
    assert body is not None
    await body()
    assert room.bytes == COPIES * MOST
    body.release()
