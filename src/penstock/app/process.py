"""What every process of a server has in common: its logs, its end by a signal or with its server, its collector."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from penstock.app.places import ServerPlaces
from penstock.app.tether import TetheredProcess
from penstock.core.config import Config
from penstock.core.errors import PenstockError
from penstock.telemetry.logs import start_logs

LEAVE_S = 5.0  # beyond what running requests get
Main = Callable[[Config, asyncio.Event], Coroutine[Any, Any, None]]


def run_child(main: Main, places: ServerPlaces, tether: TetheredProcess, **names: str) -> None:
    """`main` runs until the event that it gets is set; `names` are on every line of the log."""
    # Ctrl-C reaches every process of a terminal, but what is inside needs its workers until the gateways have drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config = places.read_config()
        start_logs(config.telemetry, **names)
        uvloop.run(_run(main, config, tether))
    except PenstockError as error:
        if not tether.say_failed(error):
            raise
        sys.exit(2)


async def _run(main: Main, config: Config, tether: TetheredProcess) -> None:
    stop = stop_on_signals(signal.SIGTERM)
    tether.attach(config.data_plane.drain_s + LEAVE_S)
    await main(config, stop)


def stop_on_signals(*numbers: int) -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    return stop


def spare_collector() -> None:
    """What was made at the start stays: the collector need not look at it again, nor often at what comes and goes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
