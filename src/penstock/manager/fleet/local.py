"""The fleet of one machine, its supervisor: child processes, restarted with backoff where they end or hang."""

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import structlog

from penstock.core.backoff import Backoff
from penstock.core.config import DataPlane
from penstock.core.errors import InternalError, PenstockError, from_code
from penstock.manager.fleet.base import FleetRole, RoleStanding
from penstock.manager.fleet.liveness import Hang, Liveness, Look
from penstock.manager.fleet.tether import Tether

log = structlog.get_logger()
TURN_S = 0.5
KILLED_S = 5.0  # what the kernel gets to end what was killed
STARTING = "it is being started"
OnExit = Callable[[str, str], None]


class LocalFleet:
    """`on_exit` gets a process's name and why it ended: `died`, `hung`, or `stopped` where that was asked for."""

    def __init__(self, settings: DataPlane, on_exit: OnExit) -> None:
        self._settings = settings
        self._on_exit = on_exit
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._doors: set[str] = set()
        self._starts: Counter[str] = Counter()
        self._stopping: set[str] = set()
        self._hung: set[str] = set()
        self._telling: set[str] = set()
        self._problems: dict[str, str] = {}  # what those say of themselves that tell whether they are ready
        self._liveness = Liveness(settings.hang_s, settings.loop_hang_s)
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch(), name="watch-children")

    async def start(self, role: FleetRole) -> None:
        """Runs its command for as long as the fleet does."""
        if role.name in self._keepers:
            return
        if role.is_door:
            self._doors.add(role.name)
        if role.is_door or role.says_ready:
            self._telling.add(role.name)
        self._keepers[role.name] = asyncio.create_task(self._keep(role.name, role.command), name=f"keep-{role.name}")

    async def watch(self) -> list[RoleStanding]:
        pids, machine = self.pids(), socket.gethostname()
        return [
            RoleStanding(
                name, "running" if name in pids else "starting", machine, pids.get(name, 0), self._starts[name]
            )
            for name in sorted(self._keepers)
        ]

    async def problem(self) -> str:
        """Why not all of them are ready; empty: they are."""
        for name in sorted(self._keepers):
            unsaid = STARTING if name in self._telling or name not in self._processes else ""
            if problem := self._problems.get(name, unsaid):
                return f"{name}: {problem}"
        return ""

    def names(self) -> set[str]:
        return set(self._keepers)

    def doors(self) -> set[str]:
        return set(self._doors)

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    async def until_open(self) -> None:
        """Returns when the first door is open; raises what keeps one from opening before that."""
        await asyncio.shield(self._opened)

    async def stop(self, names: Collection[str], timeout_s: float) -> None:
        """Asks these processes to leave, and ends those that do not."""
        self._stopping.update(names)
        self._signal(names, signal.SIGTERM)
        if left := await self._wait_gone(names, timeout_s):
            log.warning("killing", processes=sorted(left))
            self._signal(left, signal.SIGKILL)
            await self._wait_gone(left, KILLED_S)
        for name in names:
            self._keepers.pop(name).cancel()

    async def close(self) -> None:
        """Ends at once what still runs."""
        self._stopping.update(self._keepers)
        self._signal(self.names(), signal.SIGKILL)
        await self.stop(self.names(), KILLED_S)
        self._watching.cancel()
        if self._opened.done():
            self._opened.exception()  # nobody may have waited for it

    async def _wait_gone(self, names: Collection[str], timeout_s: float) -> set[str]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := self._processes.keys() & names) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return left

    async def _keep(self, name: str, command: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._settings.restart_backoff_s, self._settings.restart_backoff_max_s)
        while name not in self._stopping:
            started = loop.time()
            pid, code = await self._run(name, command)
            why = "stopped" if name in self._stopping else "hung" if name in self._hung else "died"
            self._hung.discard(name)
            self._tell(name, why)
            if why == "stopped":
                return
            self._keeps_shut(name, InternalError(f"{name} ended ({code}) before it was open; its log says why"))
            wait_s = backoff.died(loop.time() - started)
            log.error("died", process=name, pid=pid, exit_code=code, restart_in_s=round(wait_s, 2))
            await asyncio.sleep(wait_s)

    def _tell(self, name: str, why: str) -> None:
        try:
            self._on_exit(name, why)
        except Exception:
            log.exception("not_told", process=name)  # whatever it was, the process is started again

    async def _run(self, name: str, command: Sequence[str]) -> tuple[int, int | str]:
        """One life of the process; returns its id and its exit code, or why it could not be started."""
        try:
            tether = Tether(partial(self._heard, name))
        except OSError as error:  # no descriptor is free: perhaps later
            return 0, str(error)
        try:
            process = self._processes[name] = await self._start(command, tether)
            self._starts[name] += 1
            log.info("started", process=name, pid=process.pid)
            self._liveness.started(name)
            if name in self._stopping:  # that was asked for meanwhile
                self._signal([name], signal.SIGTERM)
            return process.pid, await process.wait()
        except OSError as error:  # no memory for one more process
            return 0, str(error)
        finally:
            tether.close()
            self._liveness.ended(name)
            self._problems.pop(name, None)
            if (ended := self._processes.pop(name, None)) is not None:
                _end_rest_of(ended.pid)

    async def _start(self, command: Sequence[str], tether: Tether) -> asyncio.subprocess.Process:
        fd = tether.theirs.fileno()
        try:
            # In a session of its own, by which what it leaves behind is known.
            return await asyncio.create_subprocess_exec(
                *command, "--tether", str(fd), pass_fds=(fd,), start_new_session=True
            )
        finally:
            tether.handed_over()

    def _heard(self, name: str, said: dict[str, Any]) -> None:
        if "loop_s" in said:
            self._liveness.beaten(name, said["loop_s"])
        if "open" in said:
            self._problems[name] = ""
            if not self._opened.done():
                self._opened.set_result(None)
        if "problem" in said:
            self._problems[name] = said["problem"]
        if failed := said.get("failed"):
            error = from_code(failed["code"], failed["message"], {})
            if not self._keeps_shut(name, error):
                log.error("failed", process=name, error=error.message)

    def _keeps_shut(self, name: str, error: PenstockError) -> bool:
        """Before the first door is open, what keeps one from opening is the start's error; later it is tried again."""
        if name not in self._doors or self._opened.done():
            return False
        self._opened.set_exception(error)
        return True

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TURN_S)
            try:
                self._turn(loop.time())
            except Exception:
                log.exception("watch_failed")  # a watch that ended would see nothing any more

    def _turn(self, now: float) -> None:
        looks = {name: look for name, pid in self.pids().items() if (look := _look(pid))}
        for hang in self._liveness.turn(now, looks):
            self._exchange(hang)

    def _exchange(self, hang: Hang) -> None:
        """Nothing that it could still say is wanted: a stopped process would hear nothing gentler."""
        if hang.name not in self._hung:
            log.error(
                "hung", process=hang.name, pid=self.pids()[hang.name], why=hang.why, silent_s=round(hang.seconds, 1)
            )
        self._hung.add(hang.name)
        self._signal([hang.name], signal.SIGKILL)

    def _signal(self, names: Collection[str], number: int) -> None:
        for name in self._processes.keys() & names:
            with suppress(ProcessLookupError):
                self._processes[name].send_signal(number)


def _look(pid: int) -> Look | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Look(times.user + times.system, process.status())
    except psutil.Error:
        return None  # it ended just now


def _end_rest_of(leader: int) -> None:
    """What it started and left: a process that a model forked has nobody else who would end it."""
    for pid in psutil.pids():
        with suppress(OSError):  # it ended just now
            if pid != leader and os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
