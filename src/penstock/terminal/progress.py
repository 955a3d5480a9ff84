"""Progress on standard error: bars and spinners on a terminal, otherwise a line from time to time."""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TypeVar

from penstock.core.error_text import escape_control_characters, show_size

T = TypeVar("T")
PERIOD_S = 5.0  # pause between two printed lines of one task


def print_progress(text: str) -> None:
    """Print a line to standard error, unless standard error is a terminal."""
    if not sys.stderr.isatty():
        print(f"penstock: {escape_control_characters(text)}", file=sys.stderr, flush=True)


class _Lines:
    """Prints the progress of one task, at most one line per period."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + PERIOD_S

    def show(self, text: str) -> None:
        if self._clock() >= self._next:
            self._next = self._clock() + PERIOD_S
            print_progress(text)


@contextmanager
def show_steps(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner; the yielded function sets the text of the current step."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        timer = Timer(PERIOD_S, print_progress, [what])
        timer.daemon = True
        timer.start()
        try:
            yield lambda step: print_progress(f"{what}: {step}")
        finally:
            timer.cancel()
        return
    with console.status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")


def show_progress(what: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Yield the items, and show a progress bar if there are several items."""
    from rich.console import Console

    console = Console(stderr=True)
    if total < 2 or not console.is_terminal:
        lines = _Lines()
        for done, item in enumerate(items, 1):
            lines.show(f"{what}: {done} of {total}")
            yield item
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, total, description=what)


@contextmanager
def show_bytes(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over bytes; the yielded function sets the number of completed bytes."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines()
        yield lambda done: lines.show(f"{what}: {show_size(done)} of {show_size(total)}")
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def show_count(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar with a rate; each call of the yielded function counts a completed item."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        lines, done = _Lines(), itertools.count(1)
        yield lambda: lines.show(f"{what}: {next(done)} of {total}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, rate="")

        def count() -> None:
            progress.update(task, advance=1)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:.1f}/s" if speed else "")

        yield count
