"""What events call: a command, or a signed URL. Nobody waits for them, and what they answer is not read."""

import asyncio
import hashlib
import hmac
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import structlog

from penstock.core.config import TriggerSettings
from penstock.manager.events import Event
from penstock.manager.tasks import Tasks

log = structlog.get_logger()
MAX_WAITING = 256  # events of one trigger; the oldest go
FIRST_PAUSE_S = 1.0  # before what failed is tried again; doubles
SIGNATURE, TIMESTAMP = "X-Penstock-Signature", "X-Penstock-Timestamp"
TRY_AGAIN = 429  # and all from 500 up
LOCAL = "http"


class Triggers:
    """Used from the manager's event loop."""

    def __init__(self, settings: Sequence[TriggerSettings], first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._triggers = [_Trigger(each, first_pause_s) for each in settings]
        self._tasks = Tasks("triggers")
        self.close = self._tasks.close

    def told(self, event: Event) -> None:
        for trigger in self._triggers:
            trigger.told(event)

    def start(self) -> None:
        for trigger in self._triggers:
            self._tasks.spawn(trigger.run_forever())


class _Trigger:
    """One of them: an event at a time, in their order."""

    def __init__(self, settings: TriggerSettings, first_pause_s: float) -> None:
        self._settings = settings
        self._first_pause_s = first_pause_s
        self._waiting: deque[Event] = deque(maxlen=MAX_WAITING)
        self._told = asyncio.Event()

    def told(self, event: Event) -> None:
        if not any(fnmatchcase(event.kind, pattern) for pattern in self._settings.on):
            return
        if len(self._waiting) == MAX_WAITING:
            log.warning("trigger_dropped", trigger=self._settings.name, kind=self._waiting[0].kind)
        self._waiting.append(event)
        self._told.set()

    async def run_forever(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            while self._waiting:
                await self._call(self._waiting.popleft())

    async def _call(self, event: Event) -> None:
        settings, pause_s = self._settings, self._first_pause_s
        problem = ""
        for attempt in range(settings.attempts):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                async with asyncio.timeout(settings.timeout_s):
                    problem = await self._try(event)
            except TimeoutError:
                problem = f"it took longer than {settings.timeout_s:g} s"
            except (OSError, ValueError, HTTPException) as error:  # also of names that are none
                problem = str(error) or type(error).__name__
            if not problem:
                return
        log.warning("trigger_failed", trigger=settings.name, kind=event.kind, error=problem)

    async def _try(self, event: Event) -> str:
        """Returns what is wrong; empty: nothing is."""
        body = event.model_dump_json().encode()
        if self._settings.command:
            return await run_command(self._settings.command, body)
        secret = self._settings.secret
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP: str(event.at),
            SIGNATURE: sign(secret.get_secret_value() if secret is not None else "", body),
        }
        return await post(self._settings.url, body, headers, self._settings.timeout_s)


def sign(secret: str, body: bytes) -> str:
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


async def run_command(command: Sequence[str], body: bytes) -> str:
    """Without a shell, and with the event on its standard input. What does not end in time ends with all it started."""
    nowhere = asyncio.subprocess.DEVNULL
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
    )
    try:
        process = await asyncio.shield(starting)
        await process.communicate(body)
    finally:
        with suppress(OSError, ValueError):  # why it cannot start is told above, where it is still waited for
            await _end(await starting)  # nobody else would end one that is only half started
    return f"it ended with status {process.returncode}" if process.returncode else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> str:
    """Neither follows redirects nor reads the answer. Whoever gives it up ends its thread, too."""
    parts = urlsplit(url)
    connect = HTTPConnection if parts.scheme == LOCAL else HTTPSConnection
    connection = connect(parts.hostname or "", parts.port, timeout=timeout_s)
    target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    posting = asyncio.ensure_future(asyncio.to_thread(_post, connection, target, body, headers))
    posting.add_done_callback(lambda _: posting.cancelled() or posting.exception())  # seen, where nobody asks
    try:
        status = await asyncio.shield(posting)
    finally:
        if connection.sock is not None:  # one that answers a byte now and then would keep it for ever
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
    return f"it answered {status}" if status == TRY_AGAIN or status >= 500 else ""


def _post(connection: HTTPConnection, target: str, body: bytes, headers: dict[str, str]) -> int:
    began = time.monotonic()
    try:
        connection.connect()
        if time.monotonic() - began > (connection.timeout or 0):
            raise TimeoutError
        connection.request("POST", target, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()
