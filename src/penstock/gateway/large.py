"""Large messages: decoded and encoded off the event loop, one huge one at a time, and not too many bytes at once."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from penstock.core.config import Limits
from penstock.core.errors import Overloaded

T = TypeVar("T")
# What is smaller is read where it arrives: sooner done than handed over.
LARGE_BYTES = 64 * 1024
# These wait for each other, and not those of the size that most large requests have for them.
HUGE_BYTES = 1024 * 1024


class LargeMessages:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge")
        self._held_bytes = 0  # of messages that are decoded or wait for it, whether or not somebody waits for them
        self._lock = threading.Lock()

    async def decode(self, size_bytes: int, work: Callable[..., T], *given: object) -> T:
        """Raises Overloaded where too much waits already."""
        limit = self.limits.max_decoding_bytes
        with self._lock:
            if self._held_bytes and self._held_bytes + size_bytes > limit:
                raise Overloaded(
                    f"{self._held_bytes} bytes of large messages wait to be decoded, and limits.max_decoding_bytes is "
                    f"{limit}: try again later, or send tensors as binary data"
                )
            self._held_bytes += size_bytes
        future = self._pool(size_bytes).submit(work, *given)
        future.add_done_callback(partial(self._release, size_bytes))
        del given  # the error that comes of it has this frame in its traceback, and the future has the error
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future

    async def encode(self, size_bytes: int, work: Callable[..., T], *given: object) -> T:
        """Answers are not refused: they are paid for."""
        return await asyncio.wrap_future(self._pool(size_bytes).submit(work, *given))

    def close(self) -> None:
        for pool in (self._large, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)

    def _pool(self, size_bytes: int) -> ThreadPoolExecutor:
        return self._huge if size_bytes > HUGE_BYTES else self._large

    def _release(self, size_bytes: int, done: object) -> None:
        with self._lock:
            self._held_bytes -= size_bytes
