"""A task worker in this process: who may connect, and what becomes of those who say the wrong thing."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.wire.ipc.arena import Arena, send_arenas
from penstock.wire.ipc.messages import Inbox, Message
from penstock.worker.offload import task_worker
from penstock.worker.offload.host import TaskHost
from penstock.worker.offload.task_worker import TaskWorker


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    stop = asyncio.Event()
    made = tmp_path / "tasks.sock"
    made.touch()  # as one that was killed leaves it
    running = asyncio.create_task(TaskWorker(made).run(stop, drain_s=0.1))
    await until(made.is_socket, "it listens")
    yield made
    stop.set()
    await running


def connect(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(10)
    channel.connect(str(path))
    return channel


def ask(path: Path) -> dict[str, object]:
    arenas = [Arena.create() for _ in range(4)]
    with connect(path) as channel:
        send_arenas(channel, arenas)
        channel.sendall(Message("drop", {"call": 1, "task": 7}).pack())
        (answer,) = Inbox().feed(channel.recv(1000))
    return answer.fields


async def test_a_worker_passes_its_arenas_first(path):
    assert await asyncio.to_thread(ask, path) == {"call": 1}


@pytest.mark.parametrize("count", [0, 3])
async def test_one_that_brings_no_slots_is_sent_away(path, count):
    arenas = [Arena.create() for _ in range(count)]

    def greet() -> bytes:
        with connect(path) as channel:
            if count:
                send_arenas(channel, arenas)
            else:
                channel.sendall(b"x")
            return channel.recv(1)

    assert await asyncio.to_thread(greet) == b""
    assert await asyncio.to_thread(ask, path) == {"call": 1}, "the others do not mind"


async def test_headers_that_are_none_end_their_connection_alone(path):
    def garble() -> bytes:
        arenas = [Arena.create() for _ in range(2)]
        with connect(path) as channel:
            send_arenas(channel, arenas)
            channel.sendall(b"\x02\x00\x00\x00\x00\x00\x00\x00no")
            return channel.recv(1)

    assert await asyncio.to_thread(garble) == b""
    assert await asyncio.to_thread(ask, path) == {"call": 1}


async def test_connections_have_a_bound(path, monkeypatch):
    monkeypatch.setattr(task_worker, "MAX_CONNECTIONS", 1)
    arenas = [Arena.create() for _ in range(2)]

    def one_too_many() -> bytes:
        with connect(path) as first, connect(path) as second:
            send_arenas(first, arenas)
            return second.recv(1)

    assert await asyncio.to_thread(one_too_many) == b""


async def test_one_in_which_a_call_hangs_ends_itself(path, monkeypatch):
    killed = asyncio.Event()
    monkeypatch.setattr(task_worker, "WATCH_S", 0.01)
    monkeypatch.setattr(task_worker, "HANG_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.set())
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(TaskHost):
        def answer(self, message):
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)
            return super().answer(message)

    monkeypatch.setattr(task_worker, "TaskHost", Slow)
    asking = asyncio.create_task(asyncio.to_thread(ask, path))
    async with asyncio.timeout(20):
        await killed.wait()
    release.set()
    assert await asking == {"call": 1}


async def test_memory_that_could_be_truncated_is_not_taken(path):
    def greet() -> bytes:
        unsealed = [os.memfd_create("open", os.MFD_ALLOW_SEALING) for _ in range(2)]
        with connect(path) as channel:
            socket.send_fds(channel, [b"x"], unsealed)
            for fd in unsealed:
                os.close(fd)
            return channel.recv(1)

    assert await asyncio.to_thread(greet) == b""
    assert await asyncio.to_thread(ask, path) == {"call": 1}
