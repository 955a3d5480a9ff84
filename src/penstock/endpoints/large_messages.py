"""Decoding and encoding of large messages off the event loop, with a bound on the bytes that wait to be decoded."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from penstock.core.config import Limits
from penstock.core.errors import Overloaded

T = TypeVar("T")
# Smaller messages are decoded on the event loop, which is faster than using a thread.
LARGE_BYTES = 64 * 1024
# Messages above this size have a thread of their own, so that they do not delay other large messages.
HUGE_BYTES = 1024 * 1024


class LargeMessagePool:
    """Decodes and encodes large messages in two threads, one of them for messages over HUGE_BYTES."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge")
        self._held_bytes = 0  # of messages being decoded or waiting, even if their callers were cancelled
        self._lock = threading.Lock()

    async def decode(self, size_bytes: int, work: Callable[..., T], *given: object) -> T:
        """Run `work` in a thread. Raise Overloaded if the waiting messages would exceed limits.max_decoding_bytes."""
        limit = self.limits.max_decoding_bytes
        with self._lock:
            if self._held_bytes and self._held_bytes + size_bytes > limit:
                raise Overloaded(
                    f"{self._held_bytes} bytes of large messages wait to be decoded (limits.max_decoding_bytes is "
                    f"{limit}): try again later, or send tensors as binary data"
                )
            self._held_bytes += size_bytes
        future = self._choose_pool(size_bytes).submit(work, *given)
        future.add_done_callback(partial(self._release_bytes, size_bytes))
        del given  # the traceback of an error keeps this frame alive, and would keep the message, too
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future

    async def encode(self, size_bytes: int, work: Callable[..., T], *given: object) -> T:
        """Run `work` in a thread. Waiting answers have no limit, because they are already in memory."""
        return await asyncio.wrap_future(self._choose_pool(size_bytes).submit(work, *given))

    def close(self) -> None:
        for pool in (self._large, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)

    def _choose_pool(self, size_bytes: int) -> ThreadPoolExecutor:
        return self._huge if size_bytes > HUGE_BYTES else self._large

    def _release_bytes(self, size_bytes: int, done: object) -> None:
        with self._lock:
            self._held_bytes -= size_bytes
