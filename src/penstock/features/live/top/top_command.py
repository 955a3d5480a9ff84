"""`penstock top`: shows the live view of a running server in a terminal."""

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

from penstock.core.errors import InternalError, PenstockError, Unavailable
from penstock.terminal.access import Access
from penstock.terminal.http import make_unavailable_error, open_path
from penstock.terminal.output import escape_controls
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.features.live.live_view import LiveView

RETRY_S = 1.0
KEY_S = 0.1  # between two checks for a pressed key
EXTRA_S = 10.0  # to wait for an event, in addition to the interval


class LiveEvents:
    """An open stream. Iterating yields the JSON of each event, and raises Unavailable when the stream ends."""

    def __init__(self, access: Access, http: str, interval_s: float) -> None:
        """Open the stream; raise a PenstockError if the server has no live view."""
        self._http = http
        self._answer = open_path(access, http, f"/v1/live?interval={interval_s:g}", interval_s + EXTRA_S)

    def __iter__(self) -> Iterator[bytes]:
        from http.client import HTTPException

        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").strip()
        except (OSError, HTTPException, ValueError) as error:
            raise make_unavailable_error(self._http, error) from error
        raise Unavailable(f"the server at {self._http} ended the stream: is it shutting down?")

    def close(self) -> None:
        self._answer.close()


@takes_server
def top(
    server: Server,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between refreshes.")] = 1.0,
    count: Annotated[
        int | None, typer.Option("-n", "--count", min=1, help="Exit after this many refreshes. [default: unlimited]")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show the view once and exit, like -n 1.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch the live figures of a running server; q quits.

    Shows requests, latency and its phases, queues, batches, blocks and workers.
    """
    refreshes = 1 if once else count
    http = server.http
    opening = partial(LiveEvents, server.access, http, interval)
    events = opening()
    try:
        if sys.stdout.isatty() and not as_json:
            _show_screen(http, opening, events, refreshes)
            return
        with closing(events):
            if as_json:
                for event in islice(events, refreshes):
                    print(json.dumps(json.loads(event), indent=2 if refreshes == 1 else None), flush=True)
            else:
                _print_plain(http, islice(events, refreshes))
    except KeyboardInterrupt:
        return


def _print_plain(http: str, events: Iterator[bytes]) -> None:
    from rich.console import Console

    from penstock.features.live.top.screen import History, draw_screen

    console, history = Console(), History()
    for event in events:
        history.append(_decode_view(http, event))
        console.print(draw_screen(http, history, console.width, height=None))


def _show_screen(http: str, opening: Callable[[], LiveEvents], events: LiveEvents, refreshes: int | None) -> None:
    from rich.live import Live

    from penstock.features.live.top.screen import History, draw_screen

    # A shell starts background commands with SIGINT ignored, but Ctrl-C must still end this command.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    history, trouble, seen = History(), "", 0
    feed: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
    threading.Thread(target=_fill_feed, args=(opening, events, feed), name="feed", daemon=True).start()
    with _read_keys() as keys, Live(screen=True, auto_refresh=False) as live:
        while refreshes is None or seen < refreshes:
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
                history.append(_decode_view(http, news))
            size = live.console.size
            live.update(draw_screen(http, history, size.width, size.height, trouble), refresh=True)


def _fill_feed(opening: Callable[[], LiveEvents], events: LiveEvents, feed: "queue.SimpleQueue[bytes | str]") -> None:
    """Put events, or the reason why no events come, into `feed`; reconnect whenever the stream ends.

    Runs in a thread that ends with the process, because a stream cannot be closed while another thread reads it.
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


def _decode_view(http: str, event: bytes) -> "LiveView":
    from pydantic import TypeAdapter, ValidationError

    from penstock.features.live.live_view import LiveView

    try:
        return TypeAdapter(LiveView).validate_python(escape_controls(json.loads(event)))
    except (ValidationError, ValueError) as error:
        raise InternalError(f"{http} sends events in an unknown format (another version?): try --json") from error


@contextmanager
def _read_keys() -> Iterator[Any]:
    """Yield a function that returns the keys pressed since its last call; restore the terminal at the end."""
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
