"""Router and dealers over unix sockets: messages of all sizes, and peers that stop, return or misbehave."""

import asyncio
import gc
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.waiting import until
from penstock.core.errors import ConfigError
from penstock.core.tensors import Buffer
from penstock.wire.unix.unix_sockets import IPC_PREFIX, UnixDealer, UnixRouter
from penstock.wire.unix.unix_stream import MAX_POOL_BYTES, READ_BYTES, BufferPool, decode, encode

LARGE = 5 * READ_BYTES + 7


class Bed:
    """A router that records messages, and dealers."""

    def __init__(self, file: Path) -> None:
        self.endpoint = f"{IPC_PREFIX}{file}"
        self.heard: list[tuple[bytes, list[bytes]]] = []
        self.answers: list[list[bytes]] = []
        self.open: list[Any] = []
        self.router = self.listen()

    def listen(self, max_message_bytes: int = -1) -> UnixRouter:
        def hear(identity: bytes, frames: list[Buffer]) -> None:
            self.heard.append((identity, [bytes(frame) for frame in frames]))

        router = UnixRouter(hear, max_message_bytes)
        router.bind(self.endpoint)
        self.open.append(router)
        return router

    def dial(self, identity: bytes = b"w") -> UnixDealer:
        dealer = UnixDealer(lambda frames: self.answers.append([bytes(frame) for frame in frames]), identity)
        dealer.connect(self.endpoint)
        self.open.append(dealer)
        return dealer

    def raw(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.connect(self.endpoint.removeprefix(IPC_PREFIX))
        self.open.append(SimpleNamespace(close=lambda linger_ms: made.close()))
        return made


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    made = Bed(tmp_path / "s")
    yield made
    for each in made.open:
        each.close(0)


@given(st.lists(st.binary(max_size=70), max_size=6))
def test_parts_are_unchanged_and_aligned_for_arrays(frames: list[bytes]) -> None:
    parts, size = encode(frames)
    message = np.frombuffer(b"".join(parts), np.uint8)
    assert len(message) == size
    found = decode(message.data)
    assert [bytes(frame) for frame in found] == frames
    at = [np.frombuffer(frame, np.uint8).ctypes.data - message.ctypes.data for frame in found if len(frame)]
    assert all(each % 16 == 0 for each in at)


async def test_messages_of_all_sizes_keep_their_order_in_both_directions(bed: Bed) -> None:
    dealer = bed.dial()
    sizes = [0, 1, 100, READ_BYTES - 20, READ_BYTES, LARGE, 3, LARGE, 0]
    messages = [[bytes([number]) * size, b"tail"] for number, size in enumerate(sizes)]
    for message in messages:
        assert dealer.send(message)
    await until(lambda: len(bed.heard) == len(messages))
    assert bed.heard == [(b"w", message) for message in messages]
    for message in messages:
        assert bed.router.send(b"w", message)
    await until(lambda: len(bed.answers) == len(messages))
    assert bed.answers == messages


async def test_arrays_of_any_type_and_many_parts_arrive(bed: Bed) -> None:
    dealer = bed.dial()
    numbers = np.arange(100_000, dtype=np.float64)
    frames: list[Buffer] = [numbers.data, *(b"x" * (number % 5) for number in range(2000))]
    dealer.send(frames)
    await until(lambda: bed.heard)
    ((_, found),) = bed.heard
    assert (np.frombuffer(found[0], np.float64) == numbers).all()
    assert found[1:] == [b"x" * (number % 5) for number in range(2000)]


async def test_messages_sent_before_listening_arrive_and_a_restarted_peer_is_found(tmp_path: Path) -> None:
    bed = Bed(tmp_path / "s")
    bed.router.close(0)
    dealer = bed.dial()
    dealer.send([b"early"])
    router = bed.listen()
    await until(lambda: bed.heard == [(b"w", [b"early"])])
    router.close(0)
    router = bed.listen()
    await until(lambda: dealer._stream is not None and dealer._stream.is_open and dealer.send([b"again"]))
    await until(lambda: bed.heard[-1] == (b"w", [b"again"]))
    assert router.send(b"w", [b"welcome back"])
    await until(lambda: bed.answers == [[b"welcome back"]])
    for each in bed.open:
        each.close(0)


async def test_a_peer_with_the_same_identity_replaces_the_former(bed: Bed) -> None:
    first, answers = bed.dial(), list[bytes]()
    first.send([b"hello"])
    await until(lambda: bed.heard)
    first._on_end = lambda stream: None  # type: ignore[method-assign]
    second = UnixDealer(lambda frames: answers.append(bytes(frames[0])), b"w")
    second.connect(bed.endpoint)
    bed.open.append(second)
    second.send([b"it is me"])
    await until(lambda: len(bed.heard) == 2)
    assert bed.router.send(b"w", [b"to the second"])
    await until(lambda: answers == [b"to the second"])
    assert bed.answers == []
    assert not bed.router.send(b"nobody", [b"x"])


@pytest.mark.parametrize(
    "lie",
    [
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<IQ", 0, 0),
        struct.pack("<IQ", 70_000, 1 << 30),
        struct.pack("<IQQ", 1, 32, 1 << 60) + bytes(12),
        struct.pack("<IQQ", 1, 48, 30) + bytes(48),
        struct.pack("<IQ", 1000, 100) + bytes(100),
        struct.pack("<IQ", 1, 1 << 62) + bytes(100),
    ],
)
async def test_a_misbehaving_peer_is_disconnected_without_affecting_others(bed: Bed, lie: bytes) -> None:
    dealer, liar = bed.dial(), bed.raw()
    liar.sendall(b"".join(bytes(part) for part in encode([b"liar"])[0]) + lie)
    liar.setblocking(False)
    assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(liar, 1), 20) == b""
    dealer.send([b"fine"])
    await until(lambda: bed.heard == [(b"w", [b"fine"])])
    assert not bed.router.send(b"liar", [b"x"])


async def test_messages_over_the_limit_are_refused(bed: Bed) -> None:
    bed.router.close(0)
    bed.listen(max_message_bytes=1000)
    dealer = bed.dial()
    dealer.send([b"x" * 1000])
    await until(lambda: len(bed.heard) == 1)
    dealer.send([b"x" * 200_000])
    dealer.send([b"behind it, and lost with it"])
    await until(lambda: dealer._stream is None or not bed.router._streams_by_identity)
    await until(lambda: dealer.send([b"on a new connection"]) and bed.heard[-1][1] == [b"on a new connection"])


async def test_a_peer_that_does_not_read_gets_messages_up_to_the_limit(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.wire.unix.unix_stream.MAX_WAITING_BUFFERS", 50)
    silent = bed.raw()
    silent.sendall(b"".join(bytes(part) for part in encode([b"silent"])[0]))
    await until(lambda: b"silent" in bed.router._streams_by_identity)
    sent = 0
    while bed.router.send(b"silent", [b"x" * 100_000]):
        sent += 1
    assert 20 < sent < 2000
    silent.setblocking(False)
    left = sent * (100_000 + 32)
    while left:
        left -= len(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(silent, 1 << 20), 20))
    assert bed.router.send(b"silent", [b"it reads again"])


async def test_a_handler_can_close_the_socket_or_fail(bed: Bed) -> None:
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    dealer = bed.dial()
    heard: list[bytes] = []

    def hear(frames: list[Buffer]) -> None:
        heard.append(bytes(frames[0]))
        if frames[0] == b"fail":
            raise ValueError
        if frames[0] == b"close":
            dealer.close(0)

    dealer._handler = hear
    dealer.send([b"hello"])
    await until(lambda: bed.heard)
    for word in (b"fail", b"go on", b"close", b"too late"):
        bed.router.send(b"w", [word])
    await until(lambda: b"w" not in bed.router._streams_by_identity)
    assert heard == [b"fail", b"go on", b"close"]
    assert [type(error) for error in failures] == [ValueError]
    assert not dealer.send([b"x"])


async def test_last_messages_reach_a_slow_reader(tmp_path: Path) -> None:
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        dealer = UnixDealer(lambda frames: None, b"w")
        dealer.connect(f"{IPC_PREFIX}{tmp_path}/s")
        connected, _ = listening.accept()

        def read() -> None:
            while found := connected.recv(100_000):
                heard.append(found)

        for _ in range(10):
            dealer.send([b"x" * LARGE])
        dealer.send([b"bye"])
        assert dealer._stream is not None
        assert dealer._stream._waiting, "the message is larger than the socket's buffer"
        reading = threading.Thread(target=read)
        reading.start()
        dealer.close(20_000)
        reading.join(20)
        connected.close()
    assert b"".join(heard).endswith(b"bye" + bytes(13))
    assert sum(map(len, heard)) > 10 * LARGE


async def test_an_unusable_path_is_reported(tmp_path: Path) -> None:
    router = UnixRouter(lambda *_: None, -1)
    with pytest.raises(ConfigError, match="cannot listen"):
        router.bind(f"{IPC_PREFIX}{tmp_path}/no/such/folder")
    router.close(0)
    with pytest.raises(ConfigError, match="too long"):
        UnixRouter(lambda *_: None, -1).bind(f"{IPC_PREFIX}{tmp_path}/{'x' * 200}")


def test_unreferenced_memory_is_reused() -> None:
    memory = BufferPool()
    first = memory.take(1000)
    first[:] = b"a" * 1000
    part = np.frombuffer(first[10:20], np.uint8)
    at = np.frombuffer(first, np.uint8).ctypes.data
    del first
    gc.collect()
    other = memory.take(900)
    other[:] = b"b" * 900
    assert bytes(part) == b"a" * 10
    del part
    gc.collect()
    again = memory.take(500)
    assert np.frombuffer(again, np.uint8).ctypes.data == at
    held = [memory.take(MAX_POOL_BYTES // 3) for _ in range(5)]
    held += [memory.take(MAX_POOL_BYTES + 1)]
    del held, again, other
    gc.collect()
    assert 0 < sum(each.nbytes for each in memory._free) <= MAX_POOL_BYTES
