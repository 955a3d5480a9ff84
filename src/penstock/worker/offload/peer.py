"""Who is at the other end of a worker's task calls: a process of its own, or a task worker that others use too."""

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.wire.ipc.arena import Arena, send_arenas

CONNECT_S = 1.0  # on one machine: at once, or not at all
END_S = 2.0  # what a process gets to leave
CREDENTIALS = struct.Struct("3i")  # pid, user, group


@dataclass(frozen=True, slots=True)
class TaskPeer:
    connection: socket.socket
    pid: int
    # None: a task worker. It is not ours to end: it watches itself, and what it held for us goes with the connection.
    process: "subprocess.Popen[bytes] | None" = None

    def kill(self) -> None:
        """Ends the peer if it is ours."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()  # a moment: nothing survives being killed

    async def leave(self) -> None:
        """Call it when the connection is closed. Returns when the peer has nothing of ours any more."""
        if self.process is None:
            return
        try:
            await asyncio.to_thread(self.process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise


def start_process(arenas: Sequence[Arena]) -> TaskPeer:
    """`arenas` are what both will have mapped."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            inherited = [theirs.fileno(), *(arena.fd for arena in arenas)]
            command = [sys.executable, "-m", "penstock.worker.offload.host", *map(str, inherited)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=inherited)
    except OSError:
        ours.close()
        raise
    return TaskPeer(ours, process.pid, process)


def connect_worker(path: Path, arenas: Sequence[Arena]) -> TaskPeer:
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
    return TaskPeer(connection, CREDENTIALS.unpack(credentials)[0])
