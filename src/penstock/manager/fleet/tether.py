"""What ties a child to its supervisor: a socket that both inherit, and whose end tells each that the other is gone."""

import asyncio
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.core.errors import PenstockError

BEAT_S = 0.5
LEAVE_S = 30.0  # what a child gets to leave when its supervisor is gone, before it knows the configuration
MESSAGE_BYTES = 65536
MESSAGE_CHARACTERS = 8000  # of an error, however they are written
Hear = Callable[[dict[str, Any]], None]


class Tether:
    """The supervisor's end. `theirs` goes to the child; `hear` gets what it says."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def handed_over(self) -> None:
        self.theirs.close()

    def close(self) -> None:
        """Reads what is still there: a child's last words come before its end is seen."""
        if self._ours.fileno() >= 0:
            self._read()
            asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()

    def _read(self) -> None:
        try:
            while said := self._ours.recv(MESSAGE_BYTES):
                self._hear(json.loads(said))
        except OSError:  # nothing more for now, or for ever
            return
        asyncio.get_running_loop().remove_reader(self._ours)


class TetheredProcess:
    """The child's end. A thread beats on it, and ends the process when the supervisor is gone.

    The thread starts at once, so that imports and loads do not look like a hang; without a descriptor nobody
    supervises, and there is none.
    """

    def __init__(self, fd: int | None) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._missed = 0  # beats since the loop's last turn: counted, as time also goes on while a machine sleeps
        self._leave_s = LEAVE_S
        self._socket = None if fd is None else socket.socket(fileno=fd)
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._beat, args=(self._socket,), name="tether", daemon=True).start()

    def attach(self, leave_s: float) -> None:
        """From now on the running loop must turn."""
        self._leave_s = leave_s
        self._loop = asyncio.get_running_loop()

    def say_open(self) -> None:
        self._say(open=True)

    def say_problem(self, problem: str) -> None:
        """Why it is not ready; empty: it is."""
        self._say(problem=problem[:MESSAGE_CHARACTERS])

    def say_failed(self, error: PenstockError) -> bool:
        """Whether somebody heard it, and will tell."""
        return self._say(failed={"code": error.code, "message": error.message[:MESSAGE_CHARACTERS]})

    def _beat(self, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._say(loop_s=None)
        while not poll.poll(BEAT_S * 1000):  # the supervisor says nothing: what can be read is its end
            self._say(loop_s=None if self._loop is None else self._missed * BEAT_S)
            self._ask_turn()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._leave_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def _ask_turn(self) -> None:
        if self._loop is None:
            return
        self._missed += 1
        if self._missed == 1:
            try:
                self._loop.call_soon_threadsafe(self._turned)
            except RuntimeError:
                pass  # it is closed, and never turns again

    def _turned(self) -> None:
        self._missed = 0

    def _say(self, **words: Any) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(json.dumps(words).encode(), socket.MSG_DONTWAIT)
        except OSError:  # it is full of beats that nobody reads, or nobody is there
            return False
        return True
