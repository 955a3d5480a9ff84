"""The answers of a job that has several, on their way to the caller that takes them."""

import asyncio

from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse


class AnswerStream:
    def __init__(self, ahead: int) -> None:
        """The worker may have sent `ahead` answers that were not taken; the last one comes in any case."""
        self._ahead = ahead
        self._ready: asyncio.Queue[InferResponse | PenstockError] = asyncio.Queue()
        self._has_ended = False

    def put(self, response: InferResponse) -> bool:
        """False: the worker did not wait for the caller."""
        if self._ready.qsize() >= self._ahead:
            return False
        self._ready.put_nowait(response)
        return True

    def end(self, outcome: InferResponse | PenstockError) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._ready.put_nowait(outcome)

    async def get(self) -> InferResponse:
        """Raises what the job failed with, after the answers that came before."""
        outcome = await self._ready.get()
        if isinstance(outcome, PenstockError):
            raise outcome
        return outcome
