"""The answers of a job that has several, on their way to the caller that takes them."""

import asyncio
from collections import deque

from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse


class AnswerStream:
    def __init__(self, ahead: int) -> None:
        """The worker may have sent `ahead` answers that were not taken; the last one comes in any case."""
        self._ahead = ahead
        self._ready: deque[InferResponse] = deque()
        self._end: InferResponse | PenstockError | None = None
        self._news = asyncio.Event()

    def put(self, response: InferResponse) -> bool:
        """False: the worker did not wait for the caller."""
        if len(self._ready) >= self._ahead:
            return False
        self._ready.append(response)
        self._news.set()
        return True

    def end(self, outcome: InferResponse | PenstockError) -> None:
        if self._end is None:
            self._end = outcome
            self._news.set()

    async def get(self) -> InferResponse:
        """Raises what the job failed with, after the answers that came before."""
        while not self._ready and self._end is None:
            self._news.clear()
            await self._news.wait()
        if self._ready:
            return self._ready.popleft()
        if isinstance(self._end, PenstockError):
            raise self._end
        assert self._end is not None
        return self._end
