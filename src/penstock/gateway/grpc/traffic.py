"""gRPC messages that are on their way in, and answers on their way out: gRPC holds both, and has no bound on either.

How much it has of messages that are not whole, it tells nobody. So what this process holds in all is looked at while
many are awaited, and where that grows too much, some go. What nobody awaits is not taken from the network.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
import psutil

from penstock.core.errors import Overloaded, PenstockError, TooSlow
from penstock.serving.admission import Admission
from penstock.wire.tcp_connections import cut_connection

Context: TypeAlias = grpc.aio.ServicerContext
Task: TypeAlias = asyncio.Task[Any]
LOOK_S = 0.1
FEW = 4  # messages of the largest size do no harm
SLOW_S = 0.25  # most are here at once
FREED_S = 0.3  # what was ended is freed by then


class GrpcTraffic:
    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.running = 0  # calls of one message, from their beginning to their end
        self.calls: dict[Task, Context] = {}  # that await their one message
        self._streams: dict[Task, Context] = {}  # that await their next, perhaps for long
        self._unsent = admission.unsent
        self._answers: dict[UnsentAnswer, None] = {}
        self._patience_s = admission.limits.message_timeout_s
        self._max_bytes = admission.coming.max_bytes
        self._since: dict[object, float] = {}
        self._ended: dict[Task, PenstockError] = {}
        self._process = psutil.Process()
        self._held_before = 0
        self._ended_at: tuple[float, int] | None = None  # when some were ended, and what was held then

    async def look_forever(self) -> None:
        while True:
            self.look(asyncio.get_running_loop().time(), self._process.memory_info().rss)
            await asyncio.sleep(LOOK_S)

    def look(self, now: float, held_bytes: int) -> None:
        awaited = {**self._streams, **self.calls}
        self._since = {each: self._since.get(each, now) for each in (*awaited, *self._answers)}
        for task in self.calls:
            if now - self._since[task] > self._patience_s:
                self._end(task, TooSlow(f"the message was not whole after {self._patience_s:g} seconds"))
        for answer in self._answers:
            if now - self._since[answer] > self._patience_s:
                answer.give_up()
        if len(awaited) <= FEW:
            self._held_before = held_bytes
        elif held_bytes - self._held_before <= self._max_bytes:
            self._ended_at = None
        elif self._ended_at is None:
            slow = {task: each for task, each in awaited.items() if now - self._since[task] >= SLOW_S}
            if self._make_room(slow):
                self._ended_at = now, held_bytes
        elif now - self._ended_at[0] >= FREED_S:
            if held_bytes >= self._ended_at[1]:  # it is others that grew, and others may still: not these again
                self._held_before = held_bytes
            self._ended_at = None

    async def message(self, context: Context) -> Any:
        """That of a call, or EOF."""
        return await self._read(context, _this_task(), self.calls)

    def reader(self, context: Context) -> Callable[[], Awaitable[Any]]:
        """Of a stream: gives its next message, or EOF. It is for the task that calls this."""
        return partial(self._read, context, _this_task(), self._streams)

    async def messages(self, context: Context) -> AsyncIterator[Any]:
        """Those of a stream."""
        read = self.reader(context)
        while (message := await read()) is not grpc.aio.EOF:
            yield message
            del message  # the next may be long in coming

    def turn_away(self, error: PenstockError) -> None:
        """Those who have not said all; their next message is not awaited."""
        for task in (*self.calls, *self._streams):
            self._end(task, error)

    def hold_answer(self, context: Context, size: int) -> None:
        """Counts an answer until its client has taken it."""
        answer = UnsentAnswer(context)
        self._answers[answer] = None

        def was_taken(_: Context) -> None:
            del self._answers[answer]
            self._unsent.drop(answer)

        context.add_done_callback(was_taken)
        self._unsent.hold(answer, size)

    async def _read(self, context: Context, task: Task, awaiting: dict[Task, Context]) -> Any:
        awaiting[task] = context
        try:
            return await context.read()
        except asyncio.CancelledError:
            if (error := self._ended.pop(task, None)) is None:
                raise
            task.uncancel()  # it was ended here
            raise error from None
        finally:
            del awaiting[task]

    def _make_room(self, slow: dict[Task, Context]) -> int:
        """The worse half goes, those first whose connection has most of them. Returns how many."""
        peers = {task: context.peer() for task, context in slow.items()}
        counts = Counter(peers.values())
        worst_first = sorted(slow, key=lambda task: -counts[peers[task]])
        ended = worst_first[: max(len(slow) - FEW, len(slow) // 2)]
        for task in ended:
            self._end(task, Overloaded("too much is held of messages that are not whole; try again later"))
        return len(ended)

    def _end(self, task: Task, error: PenstockError) -> None:
        if task not in self._ended:
            self._ended[task] = error
            task.cancel()


def _this_task() -> Task:
    task = asyncio.current_task()
    assert task is not None
    return task


class UnsentAnswer:
    def __init__(self, context: Context) -> None:
        self._peer = context.peer()

    def give_up(self) -> None:
        cut_connection(self._peer)
