"""Send many requests for one command: several at a time, answers in order, with progress."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from penstock.core.error_text import escape_control_characters
from penstock.terminal.progress import show_progress

if TYPE_CHECKING:
    from penstock.core.tensors import Array

CHUNK = 128  # texts per request: far below the server's limits and enough to fill its batches
CHUNKS_AT_ONCE = 4
FAILED = 2

A = TypeVar("A")
B = TypeVar("B")


def ask_all(what: str, ask: Callable[[A], B], items: Sequence[A], concurrency: int) -> list[B]:
    """Call `ask` for every item in threads and return the results in order. The first exception cancels the rest."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            return list(show_progress(what, pool.map(ask, items), len(items)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def ask_in_chunks(what: str, ask: "Callable[[Sequence[str]], Array]", texts: Sequence[str]) -> "Array":
    import numpy as np

    chunks = [texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK)]
    return np.concatenate(ask_all(what, ask, chunks, CHUNKS_AT_ONCE))


def exit_with_problems(problems: Iterable[str]) -> None:
    """Print problems to standard error and exit with status `FAILED`; return if there are no problems."""
    has_failed = False
    for problem in problems:
        print(f"penstock: {escape_control_characters(problem)}", file=sys.stderr)
        has_failed = True
    if has_failed:
        sys.exit(FAILED)
