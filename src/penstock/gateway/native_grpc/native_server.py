"""ModelInfer on pygrpc-native's server, which implements HTTP/2 and gRPC in Rust and delivers calls in batches.

It forwards all other methods to the grpcio server behind it. Limits that grpcio enforces and the native server does
not are enforced here and in `native_limits`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import structlog

from penstock.core.config import Limits
from penstock.core.errors import (
    BUG_MESSAGE,
    ConfigError,
    HeadersTooLarge,
    InternalError,
    Overloaded,
    PenstockError,
    RequestTooLarge,
)
from penstock.core.principals import ANYBODY, Needs
from penstock.endpoints.connection_limits import compute_max_grpc_connections, raise_file_limit
from penstock.gateway.native_grpc.native_limits import MAX_CALL_BYTES, NativeLimits
from penstock.gateway.native_grpc.relay import FILES_PER_CONNECTION, Relay
from penstock.gateway.oip.grpc_service import OipGrpc, create_infer_reader, encode_refusal
from penstock.gateway.oip.message_size import ENVELOPE_BYTES
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.repeated_log import RepeatedLog
from penstock.wire.tcp_connections import ConnectionCounter, close_peer_connections

log = structlog.get_logger()
now = time.monotonic
METHOD = "/inference.GRPCInferenceService/ModelInfer"
IO_THREADS = 1
SOCKET_MODE = 0o666  # the permissions of its folder decide who may connect
MAX_BATCH = 256
CHECK_S = 0.1
COUNT_S = 1.0  # between two counts of all connections while the process does not grow
GROWN_BYTES = 16 * 1024 * 1024
COUNTING_SHARE = 20  # counting takes at most 1/20 of the time
SELF_CALL_TIMEOUT_S = 5.0
LAST_ANSWERS_S = 0.5
IDLE_S = 15 * 60.0  # a client whose connection was closed between calls opens another by itself
CANCEL_EVENT = 1  # the kind of an event: the client cancelled its call
METADATA_FACTOR = 4  # the native server itself refuses metadata over this multiple of the limit, with UNKNOWN
FIELD_OVERHEAD_BYTES = 32  # HTTP/2 counts a field as its name, its value and these bytes


class NativeCall:
    """Implements the part of `grpc.aio.ServicerContext` that ModelInfer uses."""

    __slots__ = ("_deadline", "_metadata", "_peer", "has_started", "is_gone", "on_taken", "task", "trailing")

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]], peer: str, deadline: float | None) -> None:
        self._metadata, self._peer, self._deadline = metadata, peer, deadline
        self.trailing: Sequence[tuple[str, str]] | None = None
        self.on_taken: Callable[[Any], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_started = self.is_gone = False

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
        """Call `callback` when the client has read the answer."""
        self.on_taken = callback

    def cancel(self) -> None:
        self.is_gone = True
        if self.has_started and self.task is not None:  # a task that has not started would end without its cleanup
            self.task.cancel()


class NativeServer:
    """The native gRPC server, the relay in front of it, and the thread that receives its calls."""

    def __init__(self, edge: OipGrpc, limits: Limits, needs: Needs, is_port_shared: bool, path: Path) -> None:
        """Create the server. `path`: its unix socket, in a folder that only this user can open."""
        self._path = path
        self._is_behind_edge = edge.is_behind_edge
        max_connections = compute_max_grpc_connections(limits, raise_file_limit(), FILES_PER_CONNECTION)
        self._relay = Relay(path, max_connections)
        self._edge = edge
        self._needs = needs
        self._limits = limits
        self._is_port_shared = is_port_shared
        self._traffic = edge.traffic
        self._read = create_infer_reader(limits, edge.admission)
        self._most_bytes = limits.max_message_bytes + ENVELOPE_BYTES
        self._calls: dict[int, NativeCall] = {}
        # Calls that the native server delivered and the event loop has not started. One thread writes each count.
        self._batches: deque[tuple[list[Any], float]] = deque()
        self._is_scheduled = False
        self._delivered = self._delivered_bytes = self._started = self._started_bytes = 0
        self._most_waiting = 2 * limits.max_inflight_requests  # the same limit as in grpcio
        # The edge sends small messages only, and strangers' messages as well.
        most_waiting = limits.max_inflight_bytes // 2 if edge.is_behind_edge else 2 * limits.max_inflight_bytes
        self._most_waiting_bytes = max(most_waiting, self._most_bytes)
        max_held = self._traffic.transit.incoming.max_bytes
        self._connection_limits = NativeLimits(limits, max_held, max_connections, IDLE_S)
        self._whole_bytes = self._connection_limits.whole_bytes
        self._tasks = BackgroundTasks("grpc_native")
        self._cut = RepeatedLog("grpc_connections_cut")
        self._rust_server: Any = None
        self._counted_at, self._counted_bytes = -COUNT_S, 0  # when connections were last counted, and the memory then
        self._pause_s = CHECK_S
        self._process = psutil.Process()

    async def open(self, host: str, port: int, behind: str, keepalive_ms: int) -> int:
        """Listen, and return the port. `behind`: the socket of the server that has all other methods."""
        from pygrpc_native import NativeGrpcFront

        self._path.unlink(missing_ok=True)  # left by a gateway that was killed
        native = NativeGrpcFront(
            f"unix:{self._path}",
            [(METHOD, False)],
            io_threads=IO_THREADS,
            call_details=True,
            metrics=True,
            keepalive_time_ms=keepalive_ms,
            keepalive_timeout_ms=keepalive_ms,
            keepalive_permit_without_calls=False,
            max_concurrent_streams=self._limits.max_connection_calls,
            max_metadata_size=METADATA_FACTOR * self._limits.max_header_bytes,
        )
        native.set_fallback(behind)
        native.start()
        if self._is_behind_edge:
            self._path.chmod(SOCKET_MODE)
        else:
            try:
                port = await self._relay.open(
                    host, port, self._is_port_shared, await self._find_connection_number(native)
                )
            except (OSError, ConfigError):
                native.close()
                raise
        self._rust_server = native
        self._loop = asyncio.get_running_loop()
        self._counter = ConnectionCounter(port)
        # In this context, so that logs of calls carry the name of the process.
        threading.Thread(
            target=copy_context().run, args=(self._receive_calls,), name="grpc-native", daemon=True
        ).start()
        if not self._is_behind_edge:  # the edge limits connections, and holds messages until they are complete
            self._tasks.supervise("grpc-native", self._check_connections, every=lambda: self._pause_s)
        return port

    async def _find_connection_number(self, native: Any) -> int:
        """Return the number that the native server gave to its last connection, found by a call of our own."""
        async with grpc.aio.insecure_channel(f"unix:{self._path}") as channel:
            asked = asyncio.ensure_future(channel.unary_unary(METHOD)(b"", timeout=SELF_CALL_TIMEOUT_S))
            events = await asyncio.to_thread(native.recv_batch_details, 1, int(1000 * SELF_CALL_TIMEOUT_S))
            for _, call_id, _, _, _, _ in events or ():
                native.fail(call_id, grpc.StatusCode.CANCELLED.value[0], "")
            await asyncio.gather(asked, return_exceptions=True)
        match [details[1].split(":") for *_, details in events or ()]:
            case [["unix", number]] if number.isdecimal():
                return int(number)
        raise ConfigError("this pygrpc-native does not number its connections: set gateway.grpc_server to grpcio")

    async def close(self) -> None:
        """Stop the server; calls that wait fail with UNAVAILABLE."""
        if self._rust_server is None:
            return
        await self._tasks.close()
        self._relay.stop_listening()
        await asyncio.to_thread(self._rust_server.close)
        await self._relay.close(LAST_ANSWERS_S)
        for call in tuple(self._calls.values()):
            call.cancel()

    # --- in the thread that receives calls

    def _receive_calls(self) -> None:
        native = self._rust_server
        while (events := native.recv_batch_details(MAX_BATCH)) is not None:
            at = now()
            size = sum([len(event[3]) for event in events if event[3]])
            if self._is_full(len(events), size):
                events = [event for event in events if event[0] == CANCEL_EVENT or self._try_count(event)]
            else:
                self._delivered += sum([event[0] != CANCEL_EVENT for event in events])
                self._delivered_bytes += size
            self._batches.append((events, at))
            del events  # free them while the next batch is awaited
            if not self._is_scheduled:
                self._is_scheduled = True
                try:
                    self._loop.call_soon_threadsafe(self._start_delivered)
                except RuntimeError:  # the loop has ended
                    native.close()
                    return

    def _is_full(self, count: int, size: int) -> bool:
        """Return whether `count` more calls of `size` bytes would exceed the limits on waiting calls."""
        return (
            self._delivered - self._started + count > self._most_waiting
            or self._delivered_bytes - self._started_bytes + size > self._most_waiting_bytes
        )

    def _try_count(self, event: Any) -> bool:
        """Count a call, or refuse it and return False."""
        size = len(event[3])
        if self._is_full(1, size):
            self._fail_call(event[1], Overloaded("too many requests wait to be processed; try again later"))
            return False
        self._delivered += 1
        self._delivered_bytes += size
        return True

    # --- in the event loop

    def _start_delivered(self) -> None:
        self._is_scheduled = False  # first, so that later batches schedule this again
        while self._batches:
            events, at = self._batches.popleft()
            self._start_calls(events, at)

    def _start_calls(self, events: list[Any], at: float) -> None:
        calls, whole, begin, peers = self._calls, self._whole_bytes, self._loop.create_task, self._relay.peers
        for kind, call_id, _, payload, _, details in events:
            if kind == CANCEL_EVENT:
                if (left := calls.get(call_id)) is not None:
                    left.cancel()
                continue
            metadata, name, left_s = details
            peer = peers.get(name, name)
            size = len(payload)
            self._started += 1
            self._started_bytes += size
            if not self._is_behind_edge:
                whole[peer] = whole.get(peer, 0) + size + MAX_CALL_BYTES
            call = calls[call_id] = NativeCall(metadata, peer, None if left_s is None else at + left_s)
            call.task = begin(self._answer(call_id, payload, call), name="ModelInfer")

    async def _answer(self, call_id: int, payload: bytes, call: NativeCall) -> None:
        edge, context = self._edge, cast(Any, call)
        call.has_started = True
        self._traffic.running += 1
        try:
            if call.is_gone:
                return
            self._check_size(call.invocation_metadata(), len(payload))
            principal = ANYBODY if edge.guard.is_open else edge.admit(context, self._needs)
            message = self._read(payload)
            del payload
            response = await edge.ModelInfer(message, context, principal)
            self._respond(call_id, call, response.SerializeToString())
        except PenstockError as error:
            self._fail_call(call_id, error)
        except Exception:
            log.exception("bug", where="grpc", method="ModelInfer")
            self._fail_call(call_id, InternalError(BUG_MESSAGE))
        finally:
            if call.on_taken is not None:
                call.on_taken(call)
            del self._calls[call_id]
            self._traffic.running -= 1

    def _check_size(self, metadata: Sequence[tuple[str, str | bytes]], size: int) -> None:
        """Raise if grpcio would refuse the call for its size."""
        limits = self._limits
        if sum([FIELD_OVERHEAD_BYTES + len(name) + len(value) for name, value in metadata]) > limits.max_header_bytes:
            raise HeadersTooLarge(
                f"the metadata is over limits.max_header_bytes ({limits.max_header_bytes}): send less"
            )
        if size > self._most_bytes:
            raise RequestTooLarge(
                f"the message has {size} bytes, over limits.max_message_bytes ({limits.max_message_bytes}): send less"
            )

    def _respond(self, call_id: int, call: NativeCall, data: bytes) -> None:
        peer, on_taken = call.peer(), call.on_taken
        if on_taken is not None and not self._is_behind_edge and not self._connection_limits.is_known(peer):
            self._count_connections()
        is_there = self._rust_server.respond(call_id, data, None, call.trailing)
        if is_there and on_taken is not None and not self._is_behind_edge:
            call.on_taken = None
            self._connection_limits.track_answer(peer, len(data), partial(on_taken, call))

    def _fail_call(self, call_id: int, error: PenstockError) -> None:
        code, message, metadata = encode_refusal(error)
        self._rust_server.fail(call_id, code.value[0], message, metadata)

    # --- limits on the bytes that the native server holds

    def _check_connections(self) -> None:
        began, held_bytes = now(), self._process.memory_info().rss
        has_grown = held_bytes - self._counted_bytes > GROWN_BYTES
        if has_grown or self._connection_limits.is_waiting or began - self._counted_at > COUNT_S:
            self._count_connections()
            self._counted_at, self._counted_bytes = began, held_bytes
        self._pause_s = max(CHECK_S, COUNTING_SHARE * (now() - began))

    def _count_connections(self) -> None:
        inside = len(self._calls) + self._delivered - self._started
        if gone := self._connection_limits.check(
            self._counter.count(), count_undelivered_calls(self._rust_server.metrics(), inside), now()
        ):
            self._cut.add(len(gone), advice="limits.* bound what clients may hold")
            close_peer_connections(gone)


def count_undelivered_calls(metrics: Mapping[str, Any] | None, delivered: int) -> int:
    """Return the number of calls that the native server has started, minus the `delivered` calls.

    Without metrics, return 1, so that `NativeLimits` does not count partial messages as whole messages.
    """
    if metrics is None:
        return 1
    methods = metrics["methods"].values()
    started = sum(method["started"] for method in methods)
    ended = sum(status["count"] for method in methods for status in method["status"].values())
    return int(started - ended - delivered)
