"""Memory that an engine shares with a model's process, for tensors too large for their socket."""

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.tensors import Buffer

LEAST_BYTES = 1024 * 1024
KEEP_BYTES = 64 * 1024 * 1024  # what a large message leaves in memory for the next one


class Arena:
    """One process writes, the other reads; each message from the start, as the one before has been copied out.

    It has no name: it is gone when the last process that has it open is, however that ended.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)

    @classmethod
    def create(cls) -> "Arena":
        fd = os.memfd_create("penstock-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Reading where the other side has shortened it would be a SIGBUS, and the end of the worker.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(fd)

    def write(self, parts: Sequence[Buffer]) -> None:
        needed = sum(len(part) for part in parts)
        if needed > len(self._bytes):
            os.ftruncate(self.fd, max(LEAST_BYTES, 1 << (needed - 1).bit_length()))
            self._remap()
        at = 0
        for part in parts:
            end = at + len(part)
            # By NumPy rather than by a slice of the mapping: other threads run while it copies.
            self._bytes[at:end] = np.frombuffer(part, np.uint8)
            at = end

    def read(self, sizes: Sequence[int]) -> list[memoryview]:
        """Copies of what was written, which their owner may change and keep."""
        total = sum(sizes)
        if total > len(self._bytes):
            self._remap()
        if min(sizes, default=0) < 0 or total > len(self._bytes):
            raise ValueError(f"{total} bytes were announced, {len(self._bytes)} are there")
        found = []
        at = 0
        for size in sizes:
            copy = np.empty(size, np.uint8)
            copy[:] = self._bytes[at : at + size]
            found.append(copy.data)
            at += size
        if total > KEEP_BYTES:
            assert self._map is not None
            self._map.madvise(mmap.MADV_REMOVE, KEEP_BYTES)
        return found

    def held_bytes(self) -> int:
        """Of memory, which is less than its size where nothing was written."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        if self._map is not None:
            self._map.close()
            self._map = None
        os.close(self.fd)

    def _remap(self) -> None:
        size = os.fstat(self.fd).st_size
        if size == len(self._bytes):
            return
        before = self._map
        self._map = mmap.mmap(self.fd, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        if before is not None:
            before.close()
