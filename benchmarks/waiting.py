"""Waiting for a condition, which is checked repeatedly until a time limit."""

import asyncio
import time
from collections.abc import Callable, Iterator

DEFAULT_DESCRIPTION = "what was waited for"


def eventually(is_true: Callable[[], object], what: str = DEFAULT_DESCRIPTION, within_s: float = 30.0) -> None:
    for period_s in _generate_pauses(what, within_s, 0.05):
        if is_true():
            return
        time.sleep(period_s)


async def until(is_true: Callable[[], object], what: str = DEFAULT_DESCRIPTION, within_s: float = 30.0) -> None:
    """Wait until `is_true`, which is called in the event loop and must not block."""
    for period_s in _generate_pauses(what, within_s, 0.005):
        if is_true():
            return
        await asyncio.sleep(period_s)


async def until_seen(is_true: Callable[[], object], what: str = DEFAULT_DESCRIPTION, within_s: float = 30.0) -> None:
    """Wait until `is_true`, which is called in a thread because it may ask a server."""
    await asyncio.to_thread(eventually, is_true, what, within_s)


def _generate_pauses(what: str, within_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses between checks, short ones first because many conditions become true soon."""
    end = time.monotonic() + within_s
    period_s = 0.001
    while time.monotonic() < end:
        yield period_s
        period_s = min(longest_s, period_s * 2)
    raise TimeoutError(f"not reached within {within_s:g} s: {what}")
