"""Moves a process's memory into huge pages, so that reading all weights in each run needs fewer page look-ups."""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path

import numpy as np

BLOCK = 2 * 1024 * 1024
PAGES = BLOCK // PAGESIZE
PIECE = 512 * BLOCK  # examined at once; reserved memory that was never written may be very large
LEAST_FULL = 15 / 16  # share of a block that must be in use; moving the block into a huge page fills the rest
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later
_PROCESS = Path("/proc/self")


def use_huge_pages() -> None:
    """Move the process's memory into huge pages, if the system supports them.

    This takes tenths of a second per 100 MiB, so do not call it on the event loop.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or PAGESIZE != 4096:
        return
    with suppress(OSError), (_PROCESS / "pagemap").open("rb") as pages:
        for start, end in find_own_mappings((_PROCESS / "maps").read_text().splitlines()):
            for piece in range(start, end, PIECE):
                pages.seek(piece // PAGESIZE * 8)
                found = np.frombuffer(pages.read((min(end, piece + PIECE) - piece) // PAGESIZE * 8), np.uint64)
                whole = found[: len(found) // PAGES * PAGES].reshape(-1, PAGES)
                is_there = whole >> np.uint64(63)
                for block in np.flatnonzero(is_there.mean(axis=1) >= LEAST_FULL):
                    madvise(ctypes.c_size_t(piece + int(block) * BLOCK), ctypes.c_size_t(BLOCK), _COLLAPSE)


def find_own_mappings(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each private writable mapping in /proc/self/maps, rounded to whole huge pages."""
    for line in maps:
        span, modes, _, _, _, *name = line.split(maxsplit=5)
        if modes != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        start, end = -(-start // BLOCK) * BLOCK, end // BLOCK * BLOCK
        if start < end:
            yield start, end
