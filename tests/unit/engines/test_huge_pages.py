"""Memory in huge pages: the blocks that are collapsed, and their unchanged content."""

import mmap
import os
import platform
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.engines import huge_pages
from penstock.engines.huge_pages import find_own_mappings, use_huge_pages

MIB = 1024 * 1024


def test_whole_blocks_of_private_memory_are_collapsed() -> None:
    maps = [
        "7f0000001000-7f0000a00000 rw-p 00000000 00:00 0 ",
        "00c00000-01000000 rw-p 00000000 00:00 0                  [heap]",
        "7f1000000000-7f1000300000 rw-p 00000000 00:00 0          [stack]",
        "7f2000000000-7f2000300000 r--p 00000000 00:00 0",
        "7f3000000000-7f3000300000 rw-s 00000000 00:01 77         /dev/shm/of others",
        "7f4000000000-7f4000300000 rw-p 00000000 08:01 78         /usr/lib/a library",
        "7f5000001000-7f5000201000 rw-p 00000000 00:00 0",
    ]
    assert list(find_own_mappings(maps)) == [(0x7F0000200000, 0x7F0000A00000), (0xC00000, 0x1000000)]


def test_collapsed_memory_is_unchanged() -> None:
    before_mib = _huge_mib()
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        wanted = np.random.default_rng(0).integers(0, 255, len(memory), np.uint8)
        memory[:] = wanted.tobytes()
        use_huge_pages()
        assert memory[:] == wanted.tobytes()
        if _can_collapse():
            assert _huge_mib() - before_mib >= 32


def test_nothing_happens_if_the_kernel_hides_the_memory_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_PROCESS", tmp_path)
    use_huge_pages()
    (tmp_path / "pagemap").write_bytes(b"short")
    (tmp_path / "maps").write_text("00c00000-01000000 rw-p 00000000 00:00 0 [heap]\n")
    use_huge_pages()


def _huge_mib() -> int:
    found = re.search(r"AnonHugePages: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) // 1024 if found else 0


def _can_collapse() -> bool:
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    return release >= (6, 1) and os.path.exists("/sys/kernel/mm/transparent_hugepage")
