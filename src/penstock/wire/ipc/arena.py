"""Memory shared by two processes, for tensors that are too large for their socket."""

import fcntl
import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import WireError
from penstock.core.tensors import Buffer

MIN_BYTES = 1024 * 1024
MAX_IDLE_BYTES = 32 * 1024 * 1024  # memory that is kept for the next message after a large message
# The first seal prevents shrinking, because reading beyond the end would cause a SIGBUS. Growing does no harm, because
# each side maps only the bytes that it needs. The second seal prevents further seals, with which the other side could
# stop the writer from growing the memory.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Arena:
    """Memory that one process writes and another process reads.

    Each message starts at the beginning of the memory, because the reader has copied the previous message. The memory
    has no name, so the system frees it when the last process that uses it ends, even after a crash.
    """

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor. Raises WireError if the other process could shrink the memory."""
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:  # the descriptor is not shared memory
            is_sealed = False
        if not is_sealed:
            raise WireError("shared memory must be sealed against shrinking (F_SEAL_SHRINK, F_SEAL_SEAL)")

    @classmethod
    def create(cls) -> "Arena":
        fd = os.memfd_create("penstock-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return cls(fd)

    def write(self, parts: Sequence[Buffer]) -> None:
        needed = sum(len(part) for part in parts)
        if needed > len(self._bytes):
            if os.fstat(self.fd).st_size < _compute_capacity(needed):
                os.ftruncate(self.fd, _compute_capacity(needed))
            self._remap(needed)
        for part, end in zip(parts, accumulate(map(len, parts)), strict=True):
            # NumPy, unlike a slice assignment to the mapping, lets other threads run while it copies.
            self._bytes[end - len(part) : end] = np.frombuffer(part, np.uint8)

    def read(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return copies of the parts that the other process wrote; the caller may change and keep the copies."""
        total = sum(sizes)
        if total > len(self._bytes):
            self._remap(total)
        if min(sizes, default=0) < 0 or total > len(self._bytes):
            raise ValueError(f"the message announces {total} bytes, but the memory has {len(self._bytes)}")
        found = [self._bytes[end - size : end].copy().data for size, end in zip(sizes, accumulate(sizes), strict=True)]
        if total > MAX_IDLE_BYTES:
            assert self._map is not None
            self._map.madvise(mmap.MADV_REMOVE, MAX_IDLE_BYTES)
        return found

    def held_bytes(self) -> int:
        """Return the allocated bytes. They are fewer than the memory's size until every page has been written once."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Close the memory now, instead of when this object is garbage-collected."""
        self._bytes = np.empty(0, np.uint8)
        self._map = None
        self.__del__()

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _remap(self, needed_bytes: int) -> None:
        """Map only the bytes that the message needs; the other process may have made the memory too large to map."""
        size = min(_compute_capacity(needed_bytes), os.fstat(self.fd).st_size)
        if size > len(self._bytes):
            self._map = mmap.mmap(self.fd, size)
            self._bytes = np.frombuffer(self._map, np.uint8)


def _compute_capacity(needed_bytes: int) -> int:
    return max(MIN_BYTES, 1 << (needed_bytes - 1).bit_length())
