"""Who is at the other end of a worker's task calls: a process of its own, or a task worker that others use too."""

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from penstock.wire.ipc.arena import Arena, send_arenas

CONNECT_S = 1.0  # on one machine: at once, or not at all
END_S = 2.0  # what a process gets to leave
CREDENTIALS = struct.Struct("3i")  # pid, user, group


class Peer(Protocol):
    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """Ends the peer if it is ours."""

    async def leave(self) -> None:
        """Call it when the socket is closed. Returns when the peer has nothing of ours any more."""


class OwnProcess:
    """Lives and ends with its worker."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()  # a moment: nothing survives being killed

    async def leave(self) -> None:
        try:
            await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise


class SharedWorker:
    """Not ours to end: it watches itself, and what it held for us goes with the connection."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        pass

    async def leave(self) -> None:
        pass


def start_process(arenas: Sequence[Arena]) -> tuple[Peer, socket.socket]:
    """`arenas` are what both will have mapped."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = _spawn([theirs.fileno(), *(arena.fd for arena in arenas)])
    except OSError:
        ours.close()
        raise
    return OwnProcess(process), ours


def connect_worker(path: Path, arenas: Sequence[Arena]) -> tuple[Peer, socket.socket]:
    """Raises OSError where the task worker is away."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        connection.connect(str(path))
        send_arenas(connection, arenas)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    except OSError:
        connection.close()
        raise
    return SharedWorker(CREDENTIALS.unpack(credentials)[0]), connection


def _spawn(inherited: Sequence[int]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "penstock.worker.offload.host", *map(str, inherited)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=inherited)
