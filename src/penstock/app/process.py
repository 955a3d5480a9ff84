"""What every process has in common: where it belongs, its logs, its end by a signal or with its server."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock.app.folders import run_folder
from penstock.app.places import ServerPlaces
from penstock.core.config import Config
from penstock.core.errors import PenstockError
from penstock.manager.fleet.tether import TetheredProcess
from penstock.telemetry.logs import start_logs

LEAVE_S = 8.0  # beyond what running requests get: models have five seconds to close
OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)  # Ctrl-C, and its end


@dataclass(frozen=True, slots=True)
class RoleStart:
    """What a role is told as it starts: the folder of the server that it belongs to, or a configuration of its own."""

    name: str
    tether: TetheredProcess
    run_dir: Path | None = None
    config: Config | None = None

    @property
    def is_supervised(self) -> bool:
        return self.run_dir is not None


@dataclass(frozen=True, slots=True)
class RoleRun:
    """A role as it runs, until `stop` is set."""

    name: str
    config: Config
    places: ServerPlaces
    tether: TetheredProcess
    is_supervised: bool
    stop: asyncio.Event


Main = Callable[[RoleRun], Coroutine[Any, Any, None]]


def start_role_logs(role: str, start: RoleStart, config: Config) -> None:
    start_logs(config.telemetry, role=role, **{"task_worker" if role == "tasks" else role: start.name})


def run_role(role: str, start: RoleStart, main: Main) -> None:
    """The role and its name are on every line of the log."""
    try:
        if start.config is not None:
            start_role_logs(role, start, start.config)
        with _places(start) as (places, config):
            start_role_logs(role, start, config)
            uvloop.run(_run(start, places, config, main))
    except PenstockError as error:
        if not start.tether.say_failed(error):
            raise
        sys.exit(2)


@contextmanager
def _places(start: RoleStart) -> Iterator[tuple[ServerPlaces, Config]]:
    if start.run_dir is not None:
        # Ctrl-C reaches every process of a terminal, and so does its end; but what is inside needs its workers until
        # gateways have drained.
        for number in OF_TERMINALS:
            signal.signal(number, signal.SIG_IGN)
        places = ServerPlaces(start.run_dir)
        yield places, places.read_config()
        return
    assert start.config is not None
    with run_folder() as folder:
        yield ServerPlaces(folder), start.config


async def _run(start: RoleStart, places: ServerPlaces, config: Config, main: Main) -> None:
    stop = stop_on_signals(signal.SIGTERM, *(() if start.is_supervised else OF_TERMINALS))
    start.tether.attach(config.data_plane.drain_s + LEAVE_S)
    await main(RoleRun(start.name, config, places, start.tether, start.is_supervised, stop))


def stop_on_signals(*numbers: int) -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for that
            loop.add_signal_handler(number, stop.set)
    return stop


def spare_collector() -> None:
    """What was made at the start stays: the collector need not look at it again, nor often at what comes and goes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
