"""Triggers, each of which runs a command or posts a signed message to a URL for events of certain kinds."""

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
from penstock.manager.event_log import Event
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
MAX_WAITING = 256  # events per trigger; beyond this the oldest are dropped
ATTEMPTS = 3  # enough for a receiver that restarts; more would delay the following events
ATTEMPT_S = 10.0  # long enough for a web hook that answers only after its work
FIRST_PAUSE_S = 1.0  # between the first two attempts; each further pause is twice as long
SIGNATURE, TIMESTAMP = "X-Penstock-Signature", "X-Penstock-Timestamp"
TOO_MANY_REQUESTS = 429
PLAIN = "http"


class Triggers:
    """Calls the configured triggers. Used from the manager's event loop."""

    def __init__(
        self,
        settings: Sequence[TriggerSettings],
        first_pause_s: float = FIRST_PAUSE_S,
        attempt_s: float = ATTEMPT_S,
    ) -> None:
        self._triggers = [_Trigger(each, first_pause_s, attempt_s) for each in settings]
        self._tasks = BackgroundTasks("triggers")
        self.close = self._tasks.close

    def receive(self, event: Event) -> None:
        for trigger in self._triggers:
            trigger.receive(event)

    def start(self) -> None:
        for trigger in self._triggers:
            self._tasks.supervise(f"trigger-{trigger.name}", trigger.call_next, deadline_s=None)


class _Trigger:
    """Runs one trigger for one event at a time, in the order of the events."""

    def __init__(self, settings: TriggerSettings, first_pause_s: float, attempt_s: float) -> None:
        self.name = settings.name
        self._settings = settings
        self._first_pause_s = first_pause_s
        self._attempt_s = attempt_s
        self._waiting: deque[Event] = deque(maxlen=MAX_WAITING)
        self._has_waiting = asyncio.Event()

    def receive(self, event: Event) -> None:
        if not any(fnmatchcase(event.kind, pattern) for pattern in self._settings.on):
            return
        if len(self._waiting) == MAX_WAITING:
            log.warning("trigger_event_dropped", trigger=self._settings.name, kind=self._waiting[0].kind)
        self._waiting.append(event)
        self._has_waiting.set()

    async def call_next(self) -> None:
        """Wait for an event and run the command, or post to the URL."""
        if not self._waiting:
            self._has_waiting.clear()
            await self._has_waiting.wait()
        await self._call_with_retries(self._waiting.popleft())

    async def _call_with_retries(self, event: Event) -> None:
        settings, pause_s = self._settings, self._first_pause_s
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                async with asyncio.timeout(self._attempt_s):
                    problem = await self._call_once(event)
            except TimeoutError:
                problem = f"no answer within {self._attempt_s:g} s"
            except (OSError, ValueError, HTTPException) as error:  # ValueError: the host name is invalid
                problem = str(error) or type(error).__name__
            if not problem:
                return
        log.warning("trigger_failed", trigger=settings.name, kind=event.kind, error=problem)

    async def _call_once(self, event: Event) -> str:
        """Make one attempt; return the problem, or an empty string if it succeeded."""
        body = event.model_dump_json().encode()
        if self._settings.command:
            return await run_command(self._settings.command, body)
        secret = self._settings.secret
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP: str(event.at),
            SIGNATURE: sign(secret.get_secret_value() if secret is not None else "", body),
        }
        return await post(self._settings.url, body, headers, self._attempt_s)


def sign(secret: str, body: bytes) -> str:
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


async def run_command(command: Sequence[str], body: bytes) -> str:
    """Run the command without a shell, with `body` on its standard input; return the problem, or an empty string.

    When this call is cancelled, the command and all processes that it started are killed.
    """
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
        with suppress(OSError, ValueError):  # if the command cannot start, the first await raises the error
            await _kill(await starting)  # also if this call was cancelled while the command started
    return f"the command ended with status {process.returncode}" if process.returncode else ""


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        ending = asyncio.ensure_future(process.wait())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # because the triggers were closed after the time limit
            await ending  # a killed process ends at once
            raise


async def post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> str:
    """Post `body` to the URL; return the problem, or an empty string if there is none.

    Redirects are not followed and the answer's body is not read. When this call is cancelled, its thread ends, too.
    """
    parts = urlsplit(url)
    connect = HTTPConnection if parts.scheme == PLAIN else HTTPSConnection
    connection = connect(parts.hostname or "", parts.port, timeout=timeout_s)
    target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    posting = asyncio.ensure_future(asyncio.to_thread(_post, connection, target, body, headers))
    posting.add_done_callback(lambda _: posting.cancelled() or posting.exception())  # mark as retrieved
    try:
        status = await asyncio.shield(posting)
    finally:
        if (
            connection.sock is not None
        ):  # otherwise a receiver that sends a byte now and then would keep the thread forever
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
    return f"the receiver answered {status}" if status == TOO_MANY_REQUESTS or status >= 500 else ""


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
