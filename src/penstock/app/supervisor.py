"""Keeps child processes alive: starts them, restarts them with backoff, ends them gently."""

import asyncio
import signal
from collections.abc import Callable, Sequence

import structlog

from penstock.core.backoff import Backoff

log = structlog.get_logger()


class Supervisor:
    def __init__(self, backoff_first_s: float, backoff_max_s: float, on_exit: Callable[[str], None]) -> None:
        self._first_s, self._max_s = backoff_first_s, backoff_max_s
        self._on_exit = on_exit
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._is_stopping = False

    def keep(self, name: str, command: Sequence[str]) -> None:
        """Runs the command for as long as the supervisor does."""
        self._keepers[name] = asyncio.create_task(self._keep(name, command), name=f"keep-{name}")

    async def stop(self, timeout_s: float) -> None:
        """Asks every process to leave, and ends those that do not."""
        self._is_stopping = True
        for process in self._processes.values():
            _signal(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._all_gone(), timeout_s)
        except TimeoutError:
            log.warning("killing", processes=sorted(self._processes))
            for process in self._processes.values():
                _signal(process, signal.SIGKILL)
            await asyncio.wait_for(self._all_gone(), 5.0)
        for keeper in self._keepers.values():
            keeper.cancel()

    async def _all_gone(self) -> None:
        while self._processes:  # noqa: ASYNC110 - a few polls at the very end
            await asyncio.sleep(0.02)

    async def _keep(self, name: str, command: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._first_s, self._max_s)
        while not self._is_stopping:
            started = loop.time()
            process = await asyncio.create_subprocess_exec(*command)
            self._processes[name] = process
            log.info("started", process=name, pid=process.pid)
            code = await process.wait()
            del self._processes[name]
            self._on_exit(name)
            if self._is_stopping:
                return
            wait_s = backoff.died(loop.time() - started)
            log.error("died", process=name, pid=process.pid, exit_code=code, restart_in_s=round(wait_s, 2))
            await asyncio.sleep(wait_s)


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        pass
