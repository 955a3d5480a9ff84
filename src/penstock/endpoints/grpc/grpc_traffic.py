"""Limits on partial gRPC messages and unread gRPC answers, because gRPC bounds neither.

gRPC does not report how many bytes of partial messages it holds. So while many messages are awaited, the memory of the
whole process is watched, and calls are ended if that memory grows too much. gRPC reads only messages that are awaited.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import grpc
import psutil

from penstock.core.errors import Overloaded, PenstockError, TooSlow
from penstock.endpoints.edge_identity import read_message_bytes
from penstock.endpoints.held_bytes import WAIT_S, Claim, Transit
from penstock.endpoints.large_messages import HUGE_BYTES
from penstock.wire.grpc_listener.header_memory import ArrivedMessages
from penstock.wire.tcp_connections import close_connection

Context: TypeAlias = grpc.aio.ServicerContext
Task: TypeAlias = asyncio.Task[Any]
CHECK_S = 0.05
FEW = 4  # this many messages fit into memory, even if each has the largest allowed size
SLOW_S = 0.1  # most messages arrive sooner
FREED_S = 0.3  # by then the memory of ended calls is freed
SHARE = 0.5  # of the limit on held bytes, for messages of unknown size
MOST_PEERS = 1024


class GrpcTraffic:
    """The calls whose messages are awaited, and the large answers that clients have not read."""

    def __init__(
        self,
        transit: Transit,
        peer_of: Callable[[Context], str] = lambda context: context.peer(),
        is_behind_edge: bool = False,
    ) -> None:
        """Start without calls. `peer_of` returns a client's address. The edge announces the size of large messages."""
        self._is_behind_edge = is_behind_edge
        self.transit = transit
        self._peer_of = peer_of
        self.running = 0  # calls with a single request message
        self.arrived = ArrivedMessages()
        self._size_bytes = 0  # of the message that was parsed last
        self._last_bytes = 0  # of the message that was returned last
        self.calls: dict[Task, Context] = {}  # calls that await their single message
        self._streams: dict[Task, Context] = {}  # streams that await their next message, perhaps for long
        self._unsent = transit.unsent
        self._answers: dict[UnsentAnswer, None] = {}
        self._patience_s = transit.limits.message_timeout_s
        self._max_bytes = int(SHARE * transit.incoming.max_bytes)
        self._room = transit.room
        self._claimed: set[Task] = set()  # calls that have room for their message
        self._large: dict[str, int] = {}  # the size of the last large message, by peer, if messages were large
        self._since: dict[object, float] = {}
        self._ended: dict[Task, PenstockError] = {}
        self._process = psutil.Process()
        self._held_before = 0
        self._ended_at: tuple[float, int] | None = None  # when calls were ended last, and the memory at that time

    def check(self) -> None:
        self.check_at(asyncio.get_running_loop().time(), self._process.memory_info().rss)

    def check_at(self, now: float, held_bytes: int) -> None:
        """End calls and answers that take too long or hold too much. `held_bytes`: the memory of the process."""
        held_bytes -= self._room.bytes
        awaited = {**self._streams, **self.calls}
        self._since = {each: self._since.get(each, now) for each in (*awaited, *self._answers)}
        awaited = {task: each for task, each in awaited.items() if task not in self._claimed}
        for task in self.calls:
            if now - self._since[task] > self._patience_s:
                self._end_call(task, TooSlow(f"the message was not complete after {self._patience_s:g} seconds"))
        for answer in self._answers:
            if now - self._since[answer] > self._patience_s:
                answer.disconnect_client()
        if len(awaited) <= FEW:
            self._held_before = held_bytes
        elif held_bytes - self._held_before <= self._max_bytes:
            self._ended_at = None
        elif self._ended_at is None:
            slow = {task: each for task, each in awaited.items() if now - self._since[task] >= SLOW_S}
            if self._make_room(slow):
                self._ended_at = now, held_bytes
        elif now - self._ended_at[0] >= FREED_S:
            if held_bytes >= self._ended_at[1]:  # ending calls freed nothing, so something else uses the memory
                self._held_before = held_bytes
            self._ended_at = None

    def measured(self, read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Wrap `read`, which parses a message, so that the message's size is noted."""

        def measured(data: bytes) -> Any:
            self._size_bytes = len(data)
            return read(data)

        return measured

    async def message(self, context: Context, may_be_large: bool = True) -> Any:
        """Return the single message of a call, or EOF. A large message waits until there is room for it."""
        task = _this_task()
        if not may_be_large:
            return await self._read_message(context, task, self.calls, may_be_large)
        claim = Claim(self._room)
        try:
            if expected_bytes := self._expect_bytes(context):
                await claim.take(expected_bytes, _wait_s(context))
                self._claimed.add(task)
                message = await claim.arrive(self._read_message(context, task, self.calls))
            else:
                message = await self._read_message(context, task, self.calls)
            size_bytes = self._last_bytes
            claim.note_arrival(size_bytes)
            self._remember_size(context, size_bytes)
            if size_bytes > HUGE_BYTES and not expected_bytes:
                await claim.take(size_bytes, _wait_s(context), size_bytes)
        except BaseException:
            claim.release()
            raise
        finally:
            self._claimed.discard(task)
        if claim.bytes:
            context.add_done_callback(lambda _: claim.release())
        return message

    def _expect_bytes(self, context: Context) -> int:
        """Return the size of the call's message if it is known, or the size of the client's last message if large."""
        announced = read_message_bytes(context.invocation_metadata() or ()) if self._is_behind_edge else 0
        return announced or (self._large.get(self._peer_of(context), 0) if self._large else 0)

    def _remember_size(self, context: Context, size_bytes: int) -> None:
        if size_bytes > HUGE_BYTES:
            self._large[self._peer_of(context)] = size_bytes
            if len(self._large) > MOST_PEERS:
                del self._large[next(iter(self._large))]
        elif self._large:
            self._large.pop(self._peer_of(context), None)

    def reader(self, context: Context, may_be_large: bool = True) -> Callable[[], Awaitable[Any]]:
        """Return a function that reads a stream's next message, or EOF. Only the current task may call it."""
        return partial(self._read_message, context, _this_task(), self._streams, may_be_large)

    async def messages(self, context: Context) -> AsyncIterator[Any]:
        """Yield the messages of a stream. Use this only for streams of small messages."""
        read = self.reader(context, may_be_large=False)
        while (message := await read()) is not grpc.aio.EOF:
            yield message
            del message  # free it while the next one is awaited

    def reject_waiting(self, error: PenstockError) -> None:
        """End all calls and streams that await a message."""
        for task in (*self.calls, *self._streams):
            self._end_call(task, error)

    def hold_answer(self, context: Context, size: int) -> None:
        """Count an answer until its client has read it."""
        answer = UnsentAnswer(context)
        self._answers[answer] = None

        def was_taken(_: Context) -> None:
            del self._answers[answer]
            self._unsent.drop(answer)

        context.add_done_callback(was_taken)
        self._unsent.hold(answer, size)

    async def _read_message(
        self, context: Context, task: Task, awaiting: dict[Task, Context], may_be_large: bool = True
    ) -> Any:
        awaiting[task] = context
        peer = context.peer()
        try:
            with self.arrived.awaiting(peer) if may_be_large else nullcontext():
                message = await context.read()
            # gRPC calls the reader just before it returns, and does not call it at the end of the messages.
            self.arrived.add(peer, self._size_bytes, awaiting is self.calls)
            self._last_bytes, self._size_bytes = self._size_bytes, 0
            return message
        except asyncio.CancelledError:
            if (error := self._ended.pop(task, None)) is None:
                raise
            task.uncancel()  # the cancellation came from `_end_call`
            raise error from None
        finally:
            del awaiting[task]

    def _make_room(self, slow: dict[Task, Context]) -> int:
        """End half of the slow calls, first on connections with most slow calls; return the number of ended calls."""
        peers = {task: self._peer_of(context) for task, context in slow.items()}
        counts = Counter(peers.values())
        worst_first = sorted(slow, key=lambda task: -counts[peers[task]])
        ended = worst_first[: max(len(slow) - FEW, len(slow) // 2)]
        for task in ended:
            self._end_call(task, Overloaded("too many bytes of incomplete messages are held; try again later"))
        return len(ended)

    def _end_call(self, task: Task, error: PenstockError) -> None:
        if task not in self._ended:
            self._ended[task] = error
            task.cancel()


def _wait_s(context: Context) -> float:
    left_s = context.time_remaining()
    return WAIT_S if left_s is None else left_s


def _this_task() -> Task:
    task = asyncio.current_task()
    assert task is not None
    return task


class UnsentAnswer:
    """An answer that its client has not read completely."""

    def __init__(self, context: Context) -> None:
        self._peer = context.peer()

    def disconnect_client(self) -> None:
        close_connection(self._peer)
