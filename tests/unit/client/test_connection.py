"""Blocking calls to workers that answer heartbeats, and to one that does not."""

import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from penstock.client import connection
from penstock.client.connection import Connection, WorkerWatch

WAIT_S = 30.0


class Away(grpc.RpcError):  # type: ignore[misc]
    pass


def connect(asked: threading.Semaphore, is_alive: bool) -> Connection:
    def live(request: object, timeout: float) -> None:
        asked.release()
        if not is_alive:
            raise Away

    channel: Any = grpc.insecure_channel("127.0.0.1:1")
    found = Connection(channel)
    found.stub = SimpleNamespace(ServerLive=live)
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.02)


def test_calls_to_a_silent_worker_are_abandoned() -> None:
    left, asked = threading.Event(), threading.Semaphore(0)
    watch = WorkerWatch(lambda _: left.set())
    silent = connect(asked, is_alive=False)
    with watch.watch(silent):
        assert left.wait(WAIT_S)
    assert silent.is_abandoned
    watch.close()


def test_calls_to_a_live_worker_are_awaited() -> None:
    left, asked = threading.Event(), threading.Semaphore(0)
    watch = WorkerWatch(lambda _: left.set())
    busy = connect(asked, is_alive=True)
    for _ in range(2):  # the thread slept in between
        with watch.watch(busy):
            assert asked.acquire(timeout=WAIT_S)
            assert asked.acquire(timeout=WAIT_S)
    assert not busy.is_abandoned
    assert not left.is_set()
    watch.close()
    assert watch._thread is not None
    watch._thread.join(WAIT_S)
    assert not watch._thread.is_alive()
