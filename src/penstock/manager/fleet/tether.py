"""The tether: a socket pair between a supervisor and its child process, for heartbeats and reports.

When one process ends, the other process notices that the socket is closed.
"""

import asyncio
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.core.errors import PenstockError

HEARTBEAT_S = 0.5
LEAVE_S = 30.0  # for a child to shut down when its supervisor is gone; used before the configured time is known
MESSAGE_BYTES = 65536
MESSAGE_CHARACTERS = 8000  # of an error; fits into MESSAGE_BYTES in any encoding
SHOWN_BLOCKS = 6  # descriptions in the report of a gateway that is ready
SHOWN_BYTES = 4000  # limit of one description; as a string within JSON it takes at most twice this size
OnMessage = Callable[[dict[str, Any]], None]


class Tether:
    """The supervisor's end of the socket pair. The attribute `theirs` is the child's end."""

    def __init__(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def close_child_end(self) -> None:
        self.theirs.close()

    def close(self) -> None:
        """Read the messages that the child sent before it ended, and close the socket."""
        if self._ours.fileno() >= 0:
            self._read()
            asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()

    def _read(self) -> None:
        try:
            while message := self._ours.recv(MESSAGE_BYTES):
                self._on_message(json.loads(message))
        except OSError:  # no more messages at the moment, or the child has ended
            return
        asyncio.get_running_loop().remove_reader(self._ours)


class TetheredProcess:
    """The child's end of the socket pair. A thread sends heartbeats, and ends the process when the supervisor ends.

    The thread starts at once, so that imports and model loading do not look like a hang.
    """

    def __init__(self, fd: int | None) -> None:
        """Open the socket `fd`. If `fd` is None, no supervisor exists and nothing is sent."""
        self._loop: asyncio.AbstractEventLoop | None = None
        # Heartbeats since the event loop last ran. Elapsed time would also grow while the machine sleeps.
        self._missed = 0
        self._leave_s = LEAVE_S
        self._socket = None if fd is None else socket.socket(fileno=fd)
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._send_heartbeats, args=(self._socket,), name="tether", daemon=True).start()

    def attach(self, leave_s: float) -> None:
        """Start to check whether the running event loop is blocked."""
        self._leave_s = leave_s
        self._loop = asyncio.get_running_loop()

    def report_open(self) -> None:
        self._send(open=True)

    def report_ready(self, asks_for_keys: bool, blocks: Iterable[bytes]) -> None:
        """Report that a gateway is ready. `asks_for_keys`: callers need API keys. `blocks`: encoded descriptions.

        The report contains at most SHOWN_BLOCKS descriptions, and none that is longer than SHOWN_BYTES.
        """
        short = [each.decode() for each in blocks if len(each) <= SHOWN_BYTES]
        self._send(ready={"asks_for_keys": asks_for_keys, "blocks": short[:SHOWN_BLOCKS]})

    def report_problem(self, problem: str) -> None:
        """Report why the process is not ready; an empty problem means that it is ready."""
        self._send(problem=problem[:MESSAGE_CHARACTERS])

    def report_failure(self, error: PenstockError) -> bool:
        """Report an error that ends the process to the supervisor, which logs the error; return whether it was sent."""
        return self._send(failed={"code": error.code, "message": error.message[:MESSAGE_CHARACTERS]})

    def _send_heartbeats(self, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._send(loop_s=None)
        while not poll.poll(HEARTBEAT_S * 1000):  # the supervisor sends nothing; the socket is readable once it ended
            self._send(loop_s=None if self._loop is None else self._missed * HEARTBEAT_S)
            self._probe_loop()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._leave_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def _probe_loop(self) -> None:
        if self._loop is None:
            return
        self._missed += 1
        if self._missed == 1:
            try:
                self._loop.call_soon_threadsafe(self._reset_missed)
            except RuntimeError:
                pass  # the loop is closed and never runs again

    def _reset_missed(self) -> None:
        self._missed = 0

    def _send(self, **message: Any) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except OSError:  # the socket is full of unread heartbeats, or the supervisor has ended
            return False
        return True
