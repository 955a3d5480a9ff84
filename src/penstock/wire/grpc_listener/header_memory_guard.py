"""Watches the memory of a process with a gRPC server, and closes connections whose headers fill this memory."""

import asyncio
import time
from collections.abc import Mapping
from urllib.parse import unquote

import psutil

from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.freed_memory import return_freed_memory
from penstock.telemetry.repeated_log import RepeatedLog
from penstock.wire.grpc_listener.header_memory import ArrivedMessages, HeaderMemory, Traffic
from penstock.wire.tcp_connections import ConnectionCounter, abort_peer_connections, can_count

now = time.monotonic
CHECK_S = 0.05
ALARM_S = 0.02  # while the process grows
COUNT_S = 1.0  # between two counts of all connections while the process does not grow
GROWN_BYTES = 8 * 1024 * 1024
COUNTING_SHARE, ALARM_SHARE = 20, 2  # counting takes at most 1/20 of the time, and 1/2 while the process grows
FREED_S = 0.5  # time after which gRPC has freed the headers of a cut connection


class HeaderMemoryGuard:
    def __init__(self, arrived: ArrivedMessages) -> None:
        self._arrived = arrived
        self._memory = HeaderMemory()
        self._counters: list[ConnectionCounter] = []
        self._tasks = BackgroundTasks("grpc_headers")
        self._cut = RepeatedLog("grpc_headers_cut")
        self._process = psutil.Process()
        self._counted_at, self._counted_bytes = -COUNT_S, 0  # when connections were last counted, and the memory then
        self._pause_s = CHECK_S
        self._counting_s = 0.0  # processor time of the last count
        self._trim_at = 0.0  # when to return freed memory to the system; 0: nothing is to be returned

    def watch(self, port: int) -> None:
        """Count the bytes of the connections to this port from now on."""
        if can_count():
            self._counters.append(ConnectionCounter(port))

    def start(self) -> None:
        if self._counters:
            self._tasks.supervise("grpc-headers", self._check, every=lambda: self._pause_s)

    async def close(self) -> None:
        await self._tasks.close()

    async def _check(self) -> None:
        began, held_bytes = now(), self._process.memory_info().rss
        if abs(held_bytes - self._counted_bytes) > GROWN_BYTES or began - self._counted_at > COUNT_S:
            processor_s = time.thread_time()  # a busy machine must not make the pauses longer
            self._count_connections(held_bytes, began)
            self._counting_s = time.thread_time() - processor_s
        if self._trim_at and began > self._trim_at:
            self._trim_at = 0.0
            await asyncio.to_thread(return_freed_memory)
        is_growing = self._memory.growth_bytes(held_bytes) > GROWN_BYTES
        pause_s, share = (ALARM_S, ALARM_SHARE) if is_growing else (CHECK_S, COUNTING_SHARE)
        self._pause_s = max(pause_s, share * self._counting_s)

    def _count_connections(self, held_bytes: int, at: float) -> None:
        self._counted_at, self._counted_bytes = at, held_bytes
        received = {
            peer: counts.received_bytes for counter in self._counters for peer, counts in counter.count().items()
        }
        awaited = {_unquote_peer(peer) for peer in self._arrived.awaited}
        traffic = Traffic(received, self._collect_message_bytes(received), awaited, self._arrived.large_bytes)
        if cut := self._memory.check(held_bytes, traffic, at):
            self._cut.add(len(cut), advice="these connections sent headers that need much memory when decoded")
            abort_peer_connections(cut)
            self._trim_at = at + FREED_S

    def _collect_message_bytes(self, received: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of messages by peer, and forget peers that have disconnected."""
        arrived = self._arrived.bytes
        found = {peer: _unquote_peer(peer) for peer in arrived}
        for peer, plain in found.items():
            if plain not in received:
                del arrived[peer]
        return {found[peer]: size for peer, size in arrived.items()}


def _unquote_peer(peer: str) -> str:
    """Convert gRPC's name of a peer to the form that ConnectionCounter uses."""
    return unquote(peer)
