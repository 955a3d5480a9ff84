"""ModelInfer at pygrpc-native's front, which has HTTP/2 and gRPC in Rust and gives calls in batches.

All other methods go on to the server behind it. What grpcio bounds by itself, and the front does not, is bounded here
and in `front_watch`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import structlog

from penstock.core.config import Limits
from penstock.core.errors import (
    BUG,
    ConfigError,
    HeadersTooLarge,
    InternalError,
    Overloaded,
    PenstockError,
    RequestTooLarge,
)
from penstock.core.principals import ANYBODY, Needs
from penstock.gateway.grpc.front_watch import CALL_BYTES, FrontWatch
from penstock.gateway.grpc.oip import OipGrpc, infer_reader, refusal_of
from penstock.gateway.grpc.oip_wire import ENVELOPE_BYTES
from penstock.gateway.grpc.relay import FILES, Relay
from penstock.gateway.turnstile import grpc_connections, widen_files
from penstock.wire.tcp_connections import ConnectionCounter, cut_peers

log = structlog.get_logger()
now = time.monotonic
METHOD = "/inference.GRPCInferenceService/ModelInfer"
IO_THREADS = 1
BATCH = 256
LOOK_S = 0.1
COUNT_S = 1.0  # of all connections, where the process does not grow
GROWN_BYTES = 16 * 1024 * 1024
COUNTING_SHARE = 20  # of the time, at most one part
ASK_S = 5.0
LAST_WORDS_S = 0.5
IDLE_S = 15 * 60.0  # a client whose connection was closed between calls opens another by itself
CANCEL = 1  # the kind of an event
UNTOLD = 4  # times what metadata may have: the front refuses that itself, and says UNKNOWN
FIELD_BYTES = 32  # beside its name and its value, as HTTP/2 counts it


class NativeCall:
    """What of `grpc.aio.ServicerContext` ModelInfer asks for."""

    __slots__ = ("_deadline", "_metadata", "_peer", "has_begun", "is_gone", "on_taken", "task", "trailing")

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]], peer: str, deadline: float | None) -> None:
        self._metadata, self._peer, self._deadline = metadata, peer, deadline
        self.trailing: Sequence[tuple[str, str]] | None = None
        self.on_taken: Callable[[Any], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_begun = self.is_gone = False

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - now())

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self.trailing = metadata

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called when the answer has been taken."""
        self.on_taken = callback

    def cancel(self) -> None:
        self.is_gone = True
        if self.has_begun and self.task is not None:  # one that has not would end without a step
            self.task.cancel()


class NativeFront:
    def __init__(self, edge: OipGrpc, limits: Limits, needs: Needs, is_port_shared: bool, path: Path) -> None:
        """`path`: a file in a folder of its user alone, for the socket between clients' connections and the front."""
        self._path = path
        self._relay = Relay(path)
        self._edge = edge
        self._needs = needs
        self._limits = limits
        self._is_port_shared = is_port_shared
        self._traffic = edge.traffic
        self._read = infer_reader(limits, self._traffic.admission)
        self._most_bytes = limits.max_message_bytes + ENVELOPE_BYTES
        self._calls: dict[int, NativeCall] = {}
        # What the front has given and the event loop has not taken up. Each count is of one thread alone.
        self._batches: deque[tuple[list[Any], float]] = deque()
        self._is_told = False
        self._given = self._given_bytes = self._taken = self._taken_bytes = 0
        self._most_waiting = 2 * limits.max_inflight_requests  # as grpcio has it
        self._most_waiting_bytes = max(2 * limits.max_inflight_bytes, self._most_bytes)
        max_held = self._traffic.admission.coming.max_bytes
        self._watch = FrontWatch(limits, max_held, grpc_connections(limits, widen_files(), FILES), IDLE_S)
        self._whole_bytes = self._watch.whole_bytes
        self._watching: asyncio.Task[None] | None = None
        self._process = psutil.Process()

    async def open(self, host: str, port: int, behind: str, keepalive_ms: int) -> int:
        """Returns the port. `behind`: the socket of the server that has all other methods."""
        from pygrpc_native import NativeGrpcFront

        front = NativeGrpcFront(
            f"unix:{self._path}",
            [(METHOD, False)],
            io_threads=IO_THREADS,
            call_details=True,
            metrics=True,
            keepalive_time_ms=keepalive_ms,
            keepalive_timeout_ms=keepalive_ms,
            keepalive_permit_without_calls=False,
            max_concurrent_streams=self._limits.max_connection_calls,
            max_metadata_size=UNTOLD * self._limits.max_header_bytes,
        )
        front.set_fallback(behind)
        front.start()
        try:
            port = await self._relay.open(host, port, self._is_port_shared, await self._last_number(front))
        except (OSError, ConfigError):
            front.close()
            raise
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._counter = ConnectionCounter(port)
        # In this context, so that what calls log says whose process it is.
        threading.Thread(target=copy_context().run, args=(self._receive,), name="grpc-native", daemon=True).start()
        self._watching = asyncio.create_task(self._watch_forever(), name="grpc-front")
        return port

    async def _last_number(self, front: Any) -> int:
        """The front numbers a process's connections, and tells a call's: one of our own says where it is."""
        async with grpc.aio.insecure_channel(f"unix:{self._path}") as channel:
            asked = asyncio.ensure_future(channel.unary_unary(METHOD)(b"", timeout=ASK_S))
            events = await asyncio.to_thread(front.recv_batch_details, 1, int(1000 * ASK_S))
            for _, call_id, _, _, _, _ in events or ():
                front.fail(call_id, grpc.StatusCode.CANCELLED.value[0], "")
            await asyncio.gather(asked, return_exceptions=True)
        match [details[1].split(":") for *_, details in events or ()]:
            case [["unix", number]] if number.isdecimal():
                return int(number)
        raise ConfigError("this pygrpc-native does not number its connections: set gateway.grpc_server to grpcio")

    async def close(self) -> None:
        """Whoever still waits hears UNAVAILABLE."""
        if self._watching is None:
            return
        self._watching.cancel()
        self._relay.stop_listening()
        await asyncio.to_thread(self._front.close)
        await self._relay.close(LAST_WORDS_S)
        for call in tuple(self._calls.values()):
            call.cancel()

    # --- in a thread of its own

    def _receive(self) -> None:
        front = self._front
        while (events := front.recv_batch_details(BATCH)) is not None:
            at = now()
            size = sum([len(event[3]) for event in events if event[3]])
            if self._is_full(len(events), size):
                events = [event for event in events if event[0] == CANCEL or self._is_let_in(event)]
            else:
                self._given += sum([event[0] != CANCEL for event in events])
                self._given_bytes += size
            self._batches.append((events, at))
            del events  # the next may be long in coming
            if not self._is_told:
                self._is_told = True
                try:
                    self._loop.call_soon_threadsafe(self._take_all)
                except RuntimeError:  # the loop has ended
                    front.close()
                    return

    def _is_full(self, count: int, size: int) -> bool:
        """Whether with so much more, more would wait for the event loop than may."""
        return (
            self._given - self._taken + count > self._most_waiting
            or self._given_bytes - self._taken_bytes + size > self._most_waiting_bytes
        )

    def _is_let_in(self, event: Any) -> bool:
        """Counts it, or answers it here."""
        size = len(event[3])
        if self._is_full(1, size):
            self._fail(event[1], Overloaded("too many requests wait to be taken up; try again later"))
            return False
        self._given += 1
        self._given_bytes += size
        return True

    # --- in the event loop

    def _take_all(self) -> None:
        self._is_told = False  # first: what is given from now on is told anew
        while self._batches:
            events, at = self._batches.popleft()
            self._take(events, at)

    def _take(self, events: list[Any], at: float) -> None:
        calls, whole, begin, peers = self._calls, self._whole_bytes, self._loop.create_task, self._relay.peers
        for kind, call_id, _, payload, _, details in events:
            if kind == CANCEL:
                if (left := calls.get(call_id)) is not None:
                    left.cancel()
                continue
            metadata, place, left_s = details
            peer = peers.get(place, place)
            size = len(payload)
            self._taken += 1
            self._taken_bytes += size
            whole[peer] = whole.get(peer, 0) + size + CALL_BYTES
            call = calls[call_id] = NativeCall(metadata, peer, None if left_s is None else at + left_s)
            call.task = begin(self._answer(call_id, payload, call), name="ModelInfer")

    async def _answer(self, call_id: int, payload: bytes, call: NativeCall) -> None:
        edge, context = self._edge, cast(Any, call)
        call.has_begun = True
        self._traffic.running += 1
        try:
            if call.is_gone:
                return
            self._check(call.invocation_metadata(), len(payload))
            principal = ANYBODY if edge.guard.is_open else edge.admit(context, self._needs)
            message = self._read(payload)
            del payload
            response = await edge.ModelInfer(message, context, principal)
            self._respond(call_id, call, response.SerializeToString())
        except PenstockError as error:
            self._fail(call_id, error)
        except Exception:
            log.exception("bug", where="grpc", method="ModelInfer")
            self._fail(call_id, InternalError(BUG))
        finally:
            if call.on_taken is not None:
                call.on_taken(call)
            del self._calls[call_id]
            self._traffic.running -= 1

    def _check(self, metadata: Sequence[tuple[str, str | bytes]], size: int) -> None:
        """Raises for more than grpcio would take."""
        limits = self._limits
        if sum([FIELD_BYTES + len(name) + len(value) for name, value in metadata]) > limits.max_header_bytes:
            raise HeadersTooLarge(
                f"the metadata is over limits.max_header_bytes ({limits.max_header_bytes}): send less"
            )
        if size > self._most_bytes:
            raise RequestTooLarge(
                f"the message has {size} bytes, over limits.max_message_bytes ({limits.max_message_bytes}): send less"
            )

    def _respond(self, call_id: int, call: NativeCall, data: bytes) -> None:
        peer, on_taken = call.peer(), call.on_taken
        if on_taken is not None and not self._watch.knows(peer):
            self._count()
        is_there = self._front.respond(call_id, data, None, call.trailing)
        if is_there and on_taken is not None:
            call.on_taken = None
            self._watch.answered(peer, len(data), partial(on_taken, call))

    def _fail(self, call_id: int, error: PenstockError) -> None:
        code, told, metadata = refusal_of(error)
        self._front.fail(call_id, code.value[0], told, metadata)

    # --- what the front holds

    async def _watch_forever(self) -> None:
        counted, counted_bytes = -COUNT_S, 0
        while True:
            began, held_bytes = now(), self._process.memory_info().rss
            has_grown = held_bytes - counted_bytes > GROWN_BYTES
            if has_grown or self._watch.is_waiting or began - counted > COUNT_S:
                self._count()
                counted, counted_bytes = began, held_bytes
            await asyncio.sleep(max(LOOK_S, COUNTING_SHARE * (now() - began)))

    def _count(self) -> None:
        if gone := self._watch.look(self._counter.count(), self._unseen(), now()):
            log.warning("grpc_connections_cut", count=len(gone), advice="limits.* bound what clients may hold")
            cut_peers(gone)

    def _unseen(self) -> int:
        """Calls that the front has and we have not."""
        inside = len(self._calls) + self._given - self._taken
        found = self._front.metrics() or {}
        methods = found["methods"].values()
        begun = sum(method["started"] for method in methods)
        ended = sum(status["count"] for method in methods for status in method["status"].values())
        return int(begun - ended - inside)
