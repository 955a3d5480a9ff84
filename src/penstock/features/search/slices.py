"""Runs long computations on the event loop in short slices, so that requests of other callers are not delayed."""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
SLICE_S = 0.00005  # computing time before other tasks of the event loop get a turn


async def run_in_slices(steps: Generator[None, None, T]) -> T:
    """Run the generator and return its result; let other tasks run after every `SLICE_S` of computing."""
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
