"""The fleet of one machine: supervises child processes, and restarts a process with backoff when it ends or hangs."""

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

from penstock.core.blocks import BlockDescription
from penstock.core.config import DataPlane
from penstock.core.errors import InternalError, PenstockError, rebuild_error
from penstock.manager.fleet.process_liveness import Hang, ProcessLiveness, ProcessSample
from penstock.manager.fleet.role_processes import FleetRole, RoleStatus
from penstock.manager.fleet.tether import Tether
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.backoff import Backoff
from penstock.wire.encodings import decode_description

log = structlog.get_logger()
TICK_S = 0.5
KILLED_S = 5.0  # how long the kernel may take to end a killed process
# Time limit of a blocked event loop, which may only be busy: six times the default of hang_s, and longer than the
# slowest start.
LOOP_HANG_S = 30.0
# The pause before a restart doubles with each restart, from an unnoticeable one to two restarts per minute.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 30.0
STARTING = "starting"
OnExit = Callable[[str, str], None]


class LocalFleet:
    """Runs each role as a child process, under the role's name."""

    def __init__(self, settings: DataPlane, on_exit: OnExit, first_backoff_s: float = FIRST_BACKOFF_S) -> None:
        """`on_exit` gets a process's name and why the process ended: `died`, `hung` or `stopped`."""
        self._first_backoff_s = first_backoff_s
        self._on_exit = on_exit
        self._restarters: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._reporting_open: set[str] = set()
        self._starts: Counter[str] = Counter()
        self._stopping: set[str] = set()
        self._hung: set[str] = set()
        self._reporting_ready: set[str] = set()
        self._problems: dict[str, str] = {}  # by process: why it is not ready; empty if it is ready
        self._liveness = ProcessLiveness(settings.hang_s, max(LOOP_HANG_S, settings.hang_s))
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks("fleet")
        self._tasks.supervise("fleet-watch", self._tick, every=TICK_S)

    async def start(self, role: FleetRole) -> None:
        """Start the role's process, and restart the process whenever it ends, until `stop` is called."""
        if role.name in self._restarters:
            return
        if role.reports_open:
            self._reporting_open.add(role.name)
        if role.reports_open or role.reports_ready:
            self._reporting_ready.add(role.name)
        backoff = Backoff(self._first_backoff_s, MAX_BACKOFF_S)
        run = partial(self._run_and_back_off, role.name, role.command, backoff)
        self._restarters[role.name] = self._tasks.supervise(f"fleet-{role.name}", run, deadline_s=None)

    async def watch(self) -> list[RoleStatus]:
        pids, machine = self.list_pids(), socket.gethostname()
        return [
            RoleStatus(name, "running" if name in pids else "starting", machine, pids.get(name, 0), self._starts[name])
            for name in sorted(self._restarters)
        ]

    async def describe_problem(self) -> str:
        """Return why a process is not ready; empty if all processes are ready."""
        for name in sorted(self._restarters):
            default = STARTING if name in self._reporting_ready or name not in self._processes else ""
            if problem := self._problems.get(name, default):
                return f"{name}: {problem}"
        return ""

    def list_names(self) -> set[str]:
        return set(self._restarters)

    def list_names_reporting_open(self) -> set[str]:
        return set(self._reporting_open)

    def list_pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    async def wait_until_open(self) -> None:
        """Wait until a process has opened its endpoint; raise if a process fails before then."""
        await asyncio.shield(self._opened)

    async def wait_until_ready(self) -> tuple[bool, list[BlockDescription]]:
        """Wait until a gateway is ready; return whether callers need an API key, and descriptions of some blocks."""
        found = await asyncio.shield(self._ready)
        return found["asks_for_keys"], [decode_description(each.encode()) for each in found["blocks"]]

    async def stop(self, names: Collection[str], timeout_s: float) -> None:
        """Stop these processes with SIGTERM, and kill the processes that still run after `timeout_s`."""
        self._stopping.update(names)
        self._signal(names, signal.SIGTERM)
        if left := await self._wait_until_ended(names, timeout_s):
            log.warning("processes_killed", processes=sorted(left))
            self._signal(left, signal.SIGKILL)
            await self._wait_until_ended(left, KILLED_S)
        for name in names:
            self._restarters.pop(name).cancel()

    async def close(self) -> None:
        """Kill all processes that still run."""
        self._stopping.update(self._restarters)
        self._signal(self.list_names(), signal.SIGKILL)
        await self.stop(self.list_names(), KILLED_S)
        await self._tasks.close()
        if self._opened.done():
            self._opened.exception()  # mark the error as retrieved, because no task may wait for it

    async def _wait_until_ended(self, names: Collection[str], timeout_s: float) -> set[str]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := self._processes.keys() & names) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return left

    async def _run_and_back_off(self, name: str, command: Sequence[str], backoff: Backoff) -> None:
        """Run a process until it ends; return when the process may be started again."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        pid, code = await self._run(name, command)
        reason = "stopped" if name in self._stopping else "hung" if name in self._hung else "died"
        self._hung.discard(name)
        self._report_exit(name, reason)
        if reason == "stopped":
            await asyncio.Event().wait()  # `stop` cancels this task
        self._fail_start(name, InternalError(f"{name} ended ({code}) before its endpoint was open; see its log"))
        wait_s = backoff.compute_next_wait_s(loop.time() - started)
        log.error("process_died", process=name, pid=pid, exit_code=code, restart_in_s=round(wait_s, 2))
        await asyncio.sleep(wait_s)

    def _report_exit(self, name: str, reason: str) -> None:
        try:
            self._on_exit(name, reason)
        except Exception:
            log.exception("exit_callback_failed", process=name)  # the process is restarted all the same

    async def _run(self, name: str, command: Sequence[str]) -> tuple[int, int | str]:
        """Run a process until it ends; return its id and exit code, or 0 and why the process could not be started."""
        try:
            tether = Tether(partial(self._receive, name))
        except OSError as error:  # no file descriptor is free; a later restart may find one
            return 0, str(error)
        try:
            process = self._processes[name] = await self._start(command, tether)
            self._starts[name] += 1
            log.info("process_started", process=name, pid=process.pid)
            self._liveness.record_start(name)
            if name in self._stopping:  # `stop` was called while the process started
                self._signal([name], signal.SIGTERM)
            return process.pid, await process.wait()
        except OSError as error:  # no memory for another process
            return 0, str(error)
        finally:
            tether.close()
            self._liveness.record_end(name)
            self._problems.pop(name, None)
            if (ended := self._processes.pop(name, None)) is not None:
                _kill_session_of(ended.pid)

    async def _start(self, command: Sequence[str], tether: Tether) -> asyncio.subprocess.Process:
        fd = tether.theirs.fileno()
        try:
            # The child gets its own session, by which the processes that it leaves behind are found.
            return await asyncio.create_subprocess_exec(
                *command, "--tether", str(fd), pass_fds=(fd,), start_new_session=True
            )
        finally:
            tether.close_child_end()

    def _receive(self, name: str, message: dict[str, Any]) -> None:
        if "loop_s" in message:
            self._liveness.record_heartbeat(name, message["loop_s"])
        if "open" in message:
            self._problems[name] = ""
            if not self._opened.done():
                self._opened.set_result(None)
        if "ready" in message and not self._ready.done():
            self._ready.set_result(message["ready"])
        if "problem" in message:
            self._problems[name] = message["problem"]
        if failed := message.get("failed"):
            error = rebuild_error(failed["code"], failed["message"], {})
            if not self._fail_start(name, error):
                log.error("process_failed", process=name, error=error.message)

    def _fail_start(self, name: str, error: PenstockError) -> bool:
        """Make `wait_until_open` raise the error; return False if an endpoint was already open."""
        if name not in self._reporting_open or self._opened.done():
            return False
        self._opened.set_exception(error)
        return True

    def _tick(self) -> None:
        samples = {name: sample for name, pid in self.list_pids().items() if (sample := _read_sample(pid))}
        for hang in self._liveness.tick(asyncio.get_running_loop().time(), samples):
            self._kill_hung(hang)

    def _kill_hung(self, hang: Hang) -> None:
        """Kill a hung process with SIGKILL, because a stopped or deadlocked process does not handle SIGTERM."""
        if hang.name not in self._hung:
            pid, seconds = self.list_pids()[hang.name], round(hang.seconds, 1)
            log.error("process_hung", process=hang.name, pid=pid, reason=hang.kind, silent_s=seconds)
        self._hung.add(hang.name)
        self._signal([hang.name], signal.SIGKILL)

    def _signal(self, names: Collection[str], number: int) -> None:
        for name in self._processes.keys() & names:
            with suppress(ProcessLookupError):
                self._processes[name].send_signal(number)


def _read_sample(pid: int) -> ProcessSample | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessSample(times.user + times.system, process.status())
    except psutil.Error:
        return None  # the process has just ended


def _kill_session_of(leader: int) -> None:
    """Kill the processes that an ended process left behind, such as a process that a model forked."""
    for pid in psutil.pids():
        with suppress(OSError):  # the process has just ended
            if pid != leader and os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
