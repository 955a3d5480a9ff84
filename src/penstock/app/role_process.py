"""Runs a role in a process: its configuration, its logs, and its stop by a signal or by its supervisor."""

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

from penstock.core.config import Config
from penstock.core.errors import PenstockError
from penstock.manager.fleet.tether import TetheredProcess
from penstock.storage.process_addresses import ServerPaths
from penstock.storage.server_folders import create_run_folder
from penstock.telemetry.logs import start_logs

LEAVE_S = 8.0  # after draining, for the process to end: models have five seconds to close
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)  # Ctrl-C, and the end of the terminal


@dataclass(frozen=True, slots=True)
class RoleStart:
    """The start arguments of a role: the run folder of its server (`run_dir`), or its own configuration (`config`)."""

    name: str
    tether: TetheredProcess
    run_dir: Path | None = None
    config: Config | None = None

    @property
    def is_supervised(self) -> bool:
        return self.run_dir is not None


@dataclass(frozen=True, slots=True)
class RoleRun:
    """A running role, until `stop` is set."""

    name: str
    config: Config
    paths: ServerPaths
    tether: TetheredProcess
    is_supervised: bool
    stop: asyncio.Event


Main = Callable[[RoleRun], Coroutine[Any, Any, None]]


def start_role_logs(role: str, start: RoleStart, config: Config) -> None:
    start_logs(config.telemetry, role=role, **{role: start.name})


def run_role(role: str, start: RoleStart, main: Main) -> None:
    """Run `main` until it returns. Every log line has the role and its name. An error is reported to the supervisor."""
    try:
        if start.config is not None:
            start_role_logs(role, start, start.config)
        with _open_paths(start) as (paths, config):
            start_role_logs(role, start, config)
            uvloop.run(_run(start, paths, config, main))
    except PenstockError as error:
        if not start.tether.report_failure(error):
            raise
        sys.exit(2)


@contextmanager
def _open_paths(start: RoleStart) -> Iterator[tuple[ServerPaths, Config]]:
    if start.run_dir is not None:
        # Ctrl-C and the end of a terminal reach all of its processes, but running requests need the workers until the
        # gateways have drained. So only the supervisor reacts, and stops its children in order.
        for number in TERMINAL_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        paths = ServerPaths(start.run_dir)
        yield paths, paths.read_config()
        return
    assert start.config is not None
    with create_run_folder() as folder:
        yield ServerPaths(folder), start.config


async def _run(start: RoleStart, paths: ServerPaths, config: Config, main: Main) -> None:
    stop = stop_on_signals(signal.SIGTERM, *(() if start.is_supervised else TERMINAL_SIGNALS))
    start.tether.attach(config.data_plane.drain_s + LEAVE_S)
    await main(RoleRun(start.name, config, paths, start.tether, start.is_supervised, stop))


def stop_on_signals(*numbers: int) -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(number, stop.set)
    return stop


def tune_garbage_collection() -> None:
    """Exclude all objects that exist now from garbage collection, and collect new objects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
