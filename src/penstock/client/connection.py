"""A connection to a server, and a watch that closes the connections of workers that do not respond."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc

from penstock.client.direct import CHECK_TIMEOUT_S, SILENCE_S
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc
from penstock.pb.v1 import access_pb2_grpc


@dataclass(slots=True)
class Connection:
    channel: Any  # grpc.Channel or grpc.aio.Channel
    stub: Any = field(init=False)
    answered_at: float = field(default_factory=time.monotonic)
    is_abandoned: bool = False  # closed because the server did not answer a liveness check

    def __post_init__(self) -> None:
        self.stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def method(self, name: str) -> Any:
        """Return a method of the inference service, or of the service that finds workers."""
        return getattr(self.stub if hasattr(self.stub, name) else access_pb2_grpc.DirectStub(self.channel), name)

    def is_dead_after(self, error: grpc.RpcError, started: float) -> bool:
        """Return whether a call missed its deadline and no other answer has arrived since the call started."""
        return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self.answered_at < started

    def answered(self) -> None:
        self.answered_at = time.monotonic()


class WorkerWatch:
    """A thread that checks whether workers with long-running calls are alive; it sleeps while no call runs.

    One thread for all calls is cheaper than a timer for each call.
    """

    def __init__(self, on_unresponsive: Callable[[Connection], None]) -> None:
        self._on_unresponsive = on_unresponsive
        self._calls: dict[int, tuple[float, Connection]] = {}
        self._numbers = count()
        self._is_busy = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @contextmanager
    def watch(self, connection: Connection) -> Iterator[None]:
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
        self._is_closed.set()
        self._is_busy.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            self._is_busy.wait()
            if self._is_closed.wait(SILENCE_S / 2):
                return
            self._is_busy.clear()
            calls = list(self._calls.values())
            if calls:
                self._is_busy.set()
            late = {id(connection): connection for began, connection in calls if time.monotonic() - began > SILENCE_S}
            for connection in late.values():
                self._check_connection(connection)

    def _check_connection(self, connection: Connection) -> None:
        try:
            connection.stub.ServerLive(pb.ServerLiveRequest(), timeout=CHECK_TIMEOUT_S)
        except (grpc.RpcError, ValueError):  # ValueError: the channel is closed already
            connection.is_abandoned = True
            self._on_unresponsive(connection)
