"""A task worker: prepares and finishes requests for every worker that connects to its socket; holds no engine."""

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path

import structlog

from penstock.core.errors import WireError
from penstock.wire.ipc.arena import receive_arenas
from penstock.wire.ipc.channel import PeerGone
from penstock.wire.ipc.messages import Message
from penstock.worker.offload.host import TaskHost, serve

log = structlog.get_logger()
MAX_CONNECTIONS = 256
GREETING_S = 10.0  # what a worker gets to pass its arenas
HANG_S = 120.0  # a call that takes longer never ends; its worker has given it up before
WATCH_S = 1.0
RETRY_S = 0.1


class _WorkerConnection(threading.Thread):
    """Serves one worker in a thread of its own: the libraries of tasks give up the interpreter's lock."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(name="task-connection", daemon=True)  # one that hangs must not keep the process
        self._connection = connection
        self._busy_since: float | None = None

    @property
    def is_hanging(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > HANG_S

    def run(self) -> None:
        try:
            with self._connection:
                self._serve()
        except PeerGone as error:
            log.debug("task_connection_ended", reason=str(error))
        except (WireError, OSError) as error:
            log.warning("task_connection_refused", error=str(error))
        except Exception:
            log.exception("task_connection_failed")  # the others go on

    def _serve(self) -> None:
        """What the worker built and left here goes with the host."""
        self._connection.settimeout(GREETING_S)
        arenas = receive_arenas(self._connection)
        if not arenas or len(arenas) % 2:
            raise WireError(f"a worker's connection began with {len(arenas)} arenas; a call's slot has two")
        host = TaskHost()

        def answer(message: Message) -> Message | None:
            self._busy_since = time.monotonic()
            try:
                return host.answer(message)
            finally:
                self._busy_since = None

        serve(self._connection, arenas, answer)


class TaskWorker:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._connections: list[_WorkerConnection] = []

    async def run(self, stop: asyncio.Event, drain_s: float) -> None:
        """Serves until `stop`, and then workers that have not left yet, but no longer than `drain_s`."""
        with _listen(self._path) as listener:
            attending = [asyncio.create_task(self._accept(listener)), asyncio.create_task(self._watch())]
            log.info("listening", path=str(self._path))
            await stop.wait()
            for task in attending:
                task.cancel()
            await asyncio.gather(*attending, return_exceptions=True)
        end = time.monotonic() + drain_s
        while time.monotonic() < end and self._living():  # noqa: ASYNC110 - a few polls at the very end
            await asyncio.sleep(0.02)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free: perhaps later
                log.error("accept_failed", error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._living()) >= MAX_CONNECTIONS:
                log.error("too_many_connections", limit=MAX_CONNECTIONS)
                connection.close()
                continue
            serving = _WorkerConnection(connection)
            self._connections.append(serving)
            serving.start()

    def _living(self) -> list[_WorkerConnection]:
        self._connections = [connection for connection in self._connections if connection.is_alive()]
        return self._connections

    async def _watch(self) -> None:
        """A thread cannot be ended, a process can: it is started again, and its requests are prepared elsewhere."""
        while True:
            await asyncio.sleep(WATCH_S)
            if any(connection.is_hanging for connection in self._living()):
                log.error("task_worker_hangs", seconds=HANG_S)
                os.kill(os.getpid(), signal.SIGKILL)


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
