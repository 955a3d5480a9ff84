"""`penstock top`: what a running server does, as it happens."""

import json
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.options import HTTP_ADDRESS, AsJson, HttpAddress
from penstock.cli.terminal.output import plain
from penstock.cli.top.events import LiveEvents
from penstock.core.errors import InternalError, PenstockError

if TYPE_CHECKING:
    from penstock.telemetry.live_view import LiveView

RETRY_S = 1.0
KEY_S = 0.1  # how soon a key is noticed


@shows_key
def top(
    access: Access,
    http: HttpAddress = HTTP_ADDRESS,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between looks.")] = 1.0,
    count: Annotated[int | None, typer.Option("-n", "--count", min=1, help="Looks, then end.")] = None,
    once: Annotated[bool, typer.Option("--once", help="One look, then end: the same as -n 1.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a running server: requests, latency and its phases, queues, batches, blocks and workers. q quits."""
    looks = 1 if once else count
    opening = partial(LiveEvents, access, http, interval)
    events = opening()
    try:
        if sys.stdout.isatty() and not as_json:
            _show_screen(http, opening, events, looks)
            return
        with closing(events):
            if as_json:
                for event in islice(events, looks):
                    print(json.dumps(json.loads(event), indent=2 if looks == 1 else None), flush=True)
            else:
                _print_plain(http, islice(events, looks))
    except KeyboardInterrupt:
        return


def _print_plain(http: str, events: Iterator[bytes]) -> None:
    from rich.console import Console

    from penstock.cli.top.screen import History, screen

    console, history = Console(), History()
    for event in events:
        history.append(_view(http, event))
        console.print(screen(http, history, console.width, height=None))


def _show_screen(http: str, opening: Callable[[], LiveEvents], events: LiveEvents, looks: int | None) -> None:
    from rich.live import Live

    from penstock.cli.top.screen import History, screen

    # A shell that starts this in the background has it ignore Ctrl-C; on a screen it must still end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    history, trouble, seen = History(), "", 0
    feed: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
    threading.Thread(target=_feed, args=(opening, events, feed), name="feed", daemon=True).start()
    with _keys() as keys, Live(screen=True, auto_refresh=False) as live:
        while looks is None or seen < looks:
            if any(key in "qQ" for key in keys()):
                return
            try:
                news = feed.get(timeout=KEY_S)
            except queue.Empty:
                continue
            if isinstance(news, str):
                trouble = news
            else:
                trouble, seen = "", seen + 1
                history.append(_view(http, news))
            size = live.console.size
            live.update(screen(http, history, size.width, size.height, trouble), refresh=True)


def _feed(opening: Callable[[], LiveEvents], events: LiveEvents, feed: "queue.SimpleQueue[bytes | str]") -> None:
    """Events, or why there are none; a server that went away is asked again until it is back.

    The stream is this thread's alone: it ends with the process, since nobody else may close what is being read.
    """
    pause = threading.Event()
    opened: LiveEvents | None = events
    while True:
        try:
            opened = opened or opening()
            for event in opened:
                feed.put(event)
        except PenstockError as error:
            if opened is not None:
                opened.close()
            opened = None
            feed.put(error.message)
        pause.wait(RETRY_S)


def _view(http: str, event: bytes) -> "LiveView":
    from pydantic import TypeAdapter, ValidationError

    from penstock.telemetry.live_view import LiveView

    try:
        return TypeAdapter(LiveView).validate_python(plain(json.loads(event)))
    except (ValidationError, ValueError) as error:
        raise InternalError(f"{http} sends other events than this command knows: try --json") from error


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that gives the keys pressed since its last call. The terminal is as before afterwards."""
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    import os
    import select
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed() -> str:
        if not select.select([terminal], [], [], 0)[0]:
            return ""
        return os.read(terminal, 64).decode(errors="replace")

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
