"""Memory that two processes share, for tensors too large for their socket."""

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import WireError
from penstock.core.tensors import Buffer

LEAST_BYTES = 1024 * 1024
KEEP_BYTES = 32 * 1024 * 1024  # what a large message leaves in memory for the next one
GREETING = b"\0"  # descriptors travel with a byte at least
MAX_PASSED = 16
# Reading where the other side has shortened it would be a SIGBUS, and the end of the process. That it grows does no
# harm: each side maps what it needs of it. That the other side seals more would keep the writer from growing it.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Arena:
    """One process writes, the other reads; each message from the start, as the one before has been copied out.

    It has no name: it is gone when the last process that has it open is, however that ended.
    """

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over. Raises WireError where the memory could be taken from under us."""
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:  # no memory at all
            is_sealed = False
        if not is_sealed:
            raise WireError("memory to share must be sealed against being made shorter")

    @classmethod
    def create(cls) -> "Arena":
        fd = os.memfd_create("penstock-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return cls(fd)

    def write(self, parts: Sequence[Buffer]) -> None:
        needed = sum(len(part) for part in parts)
        if needed > len(self._bytes):
            if os.fstat(self.fd).st_size < _room(needed):
                os.ftruncate(self.fd, _room(needed))
            self._remap(needed)
        for part, end in zip(parts, accumulate(map(len, parts)), strict=True):
            # By NumPy rather than by a slice of the mapping: other threads run while it copies.
            self._bytes[end - len(part) : end] = np.frombuffer(part, np.uint8)

    def read(self, sizes: Sequence[int]) -> list[memoryview]:
        """Copies of what was written, which their owner may change and keep."""
        total = sum(sizes)
        if total > len(self._bytes):
            self._remap(total)
        if min(sizes, default=0) < 0 or total > len(self._bytes):
            raise ValueError(f"{total} bytes were announced, {len(self._bytes)} are there")
        found = [self._bytes[end - size : end].copy().data for size, end in zip(sizes, accumulate(sizes), strict=True)]
        if total > KEEP_BYTES:
            assert self._map is not None
            self._map.madvise(mmap.MADV_REMOVE, KEEP_BYTES)
        return found

    def held_bytes(self) -> int:
        """The memory that it takes: less than its size where nothing was written."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Closes it now; else it is closed when nobody refers to it any more."""
        self._bytes = np.empty(0, np.uint8)
        self._map = None
        self.__del__()

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _remap(self, needed: int) -> None:
        """Maps as much as the message needs: the other side may have made it larger than we could map."""
        size = min(_room(needed), os.fstat(self.fd).st_size)
        if size > len(self._bytes):
            self._map = mmap.mmap(self.fd, size)
            self._bytes = np.frombuffer(self._map, np.uint8)


def _room(needed: int) -> int:
    return max(LEAST_BYTES, 1 << (needed - 1).bit_length())


def send_arenas(connection: socket.socket, arenas: Sequence[Arena]) -> None:
    """The first thing on a connection: what both ends will have mapped."""
    socket.send_fds(connection, [GREETING], [arena.fd for arena in arenas])


def receive_arenas(connection: socket.socket) -> list[Arena]:
    """Raises WireError where one could be taken from under us."""
    # One byte is read and no more: what follows are messages.
    _, fds, *_ = socket.recv_fds(connection, len(GREETING), MAX_PASSED, socket.MSG_CMSG_CLOEXEC)
    arenas: list[Arena] = []
    try:
        while fds:
            arenas.append(Arena(fds.pop(0)))
    finally:
        for fd in fds:  # after one that was refused
            os.close(fd)
    return arenas
