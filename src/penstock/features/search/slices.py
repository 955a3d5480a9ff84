"""Runs long computations on the event loop in short slices, so that requests of other callers are not delayed."""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
SLICE_S = 0.00005  # computing time between two turns of the event loop


async def run_in_slices(steps: Generator[None, None, T]) -> T:
    """Return the generator's result; let other tasks run whenever it has computed for `SLICE_S`."""
    until = time.perf_counter() + SLICE_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S
