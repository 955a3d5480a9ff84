"""A buffer for the answers to one streamed request, between the worker and the caller."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from math import inf
from typing import Any

from penstock.core.requests import InferResponse

MAX_ANSWERS_AHEAD = 8  # answers that a source may send before the caller takes them


class AnswerStream:
    """An `AnswerSink` that yields its answers through an async generator."""

    def __init__(self) -> None:
        self.has_begun = False
        self._queue: asyncio.Queue[InferResponse | None] = asyncio.Queue()  # None: the run has ended
        self._max_waiting = inf
        self._allow_every = inf  # the source continues when this many answers were taken
        self._allow: Callable[[int], None] | None = None
        self._taken_answers = 0

    def begin(self, ahead: int, allow: Callable[[int], None]) -> None:
        self._max_waiting, self._allow, self._taken_answers = ahead, allow, 0
        self._allow_every = max(1, ahead // 2)  # a message for each taken answer would cost as much as the answers

    def put(self, answer: InferResponse) -> bool:
        if self._queue.qsize() >= self._max_waiting:
            return False
        self.has_begun = True
        self._queue.put_nowait(answer)
        return True

    async def follow(self, run: Coroutine[Any, Any, InferResponse]) -> AsyncGenerator[InferResponse, None]:
        """Yield the answers that `run` puts into this stream, then the answer that `run` returns.

        Cancel `run` if the generator is closed early.
        """
        task = asyncio.create_task(run)
        task.add_done_callback(self._end_stream)
        try:
            while (answer := await self._queue.get()) is not None:
                self._taken_answers += 1
                if self._taken_answers >= self._allow_every and self._allow is not None:
                    self._allow(self._taken_answers)
                    self._taken_answers = 0
                yield answer
            yield await task
        finally:
            self._allow = None  # breaks a cycle: the callback may refer to the request, which refers to this stream
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            del task  # breaks a reference cycle: the task's error refers to this stack frame

    def _end_stream(self, task: asyncio.Task[InferResponse]) -> None:
        if not task.cancelled():
            task.exception()  # marks the error as retrieved: the caller may have left
        self._queue.put_nowait(None)
