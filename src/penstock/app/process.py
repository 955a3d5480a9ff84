"""What every process of a server has in common: its logs, its end by a signal or with its parent, its collector."""

import asyncio
import ctypes
import gc
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from penstock.app.places import ServerPlaces
from penstock.core.config import Config
from penstock.telemetry.logs import start_logs

PR_SET_PDEATHSIG = 1
Main = Callable[[Config, asyncio.Event], Coroutine[Any, Any, None]]


def run_child(main: Main, places: ServerPlaces, **names: str) -> None:
    """`main` runs until the event that it gets is set; `names` are on every line of the log."""
    config = places.read_config()
    start_logs(config.telemetry, **names)
    uvloop.run(_run(main, config))


async def _run(main: Main, config: Config) -> None:
    stop = stop_on_signals(signal.SIGTERM)
    _stop_with_parent()
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


def _stop_with_parent() -> None:
    """A child must not outlive its server, however that ends; nor leave before it.

    Ctrl-C reaches every process of a terminal, but what is inside needs its workers until the gateway has drained.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
