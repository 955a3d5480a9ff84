"""Looks after blocking calls to workers: one that says nothing is left, and with it go all that wait for it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import grpc

from penstock.client.connection import Connection
from penstock.client.direct import CHECK_S, PROBE_S
from penstock.pb.inference import grpc_service_pb2 as pb


class WorkerWatch:
    """A thread of its own, which sleeps while there are no calls: looking at each of them would cost every call."""

    def __init__(self, leave: Callable[[Connection], None]) -> None:
        self._leave = leave
        self._calls: dict[int, tuple[float, Connection]] = {}
        self._numbers = count()
        self._is_busy = threading.Event()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @contextmanager
    def over(self, connection: Connection) -> Iterator[None]:
        number = next(self._numbers)
        self._calls[number] = time.monotonic(), connection
        self._is_busy.set()
        if self._thread is None:
            self._start()
        try:
            yield
        finally:
            del self._calls[number]

    def close(self) -> None:
        self._is_over.set()
        self._is_busy.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._is_busy.wait()
            if self._is_over.wait(CHECK_S / 2):
                return
            self._is_busy.clear()
            calls = list(self._calls.values())
            if calls:
                self._is_busy.set()
            late = {id(connection): connection for began, connection in calls if time.monotonic() - began > CHECK_S}
            for connection in late.values():
                self._check(connection)

    def _check(self, connection: Connection) -> None:
        try:
            connection.stub.ServerLive(pb.ServerLiveRequest(), timeout=PROBE_S)
        except (grpc.RpcError, ValueError):  # the second: it is closed already
            connection.is_left = True
            self._leave(connection)
