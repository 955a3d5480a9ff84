"""Progress on standard error: shown to people only, so that logs and pipes stay clean."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def show_steps(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner beside work of unknown length, which may say what it does now."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")


def show_progress(what: str, items: Iterable[T], total: int) -> Iterator[T]:
    """A bar over several items; one alone needs none."""
    from rich.console import Console

    console = Console(stderr=True)
    if total < 2 or not console.is_terminal:
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, total, description=what)


@contextmanager
def show_bytes(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes, for what says itself how many are done."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def show_count(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar with a rate, for work that says itself when an item is done."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
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
