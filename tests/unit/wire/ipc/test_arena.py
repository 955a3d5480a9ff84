"""Memory shared by two processes: data survives, and neither side can harm the other."""

import fcntl
import os
import subprocess
import sys

import pytest

from penstock.core.errors import WireError
from penstock.wire.ipc import arena as arena_module
from penstock.wire.ipc.arena import Arena

TRUNCATES = """
import fcntl, os, sys
fd = int(sys.argv[1])
for harm in (
    lambda: os.ftruncate(fd, 0),
    lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW),
):
    try:
        harm()
    except PermissionError:
        print("refused")
"""


def pair() -> tuple[Arena, Arena]:
    """Return one arena, as each of two processes has it."""
    writer = Arena.create()
    return writer, Arena(os.dup(writer.fd))


def parts_of(*sizes: int) -> list[bytes]:
    return [bytes([i + 1]) * size for i, size in enumerate(sizes)]


@pytest.fixture
def keep_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(arena_module, "MAX_IDLE_BYTES", 2 * 1024 * 1024)
    return arena_module.MAX_IDLE_BYTES


def test_the_arena_grows_under_its_reader_and_shrinks_after_rare_peaks(keep_bytes: int) -> None:
    writer, reader = pair()
    for sizes in ((), (0,), (1, 0, 3), (70_001,), (3 * keep_bytes + 1, 5), (7,), (keep_bytes, 1), (100, 200)):
        sent = parts_of(*sizes)
        writer.write(sent)
        assert [bytes(part) for part in reader.read(sizes)] == sent
        assert reader.held_bytes() <= keep_bytes


def test_data_that_was_read_stays_when_the_memory_is_overwritten() -> None:
    writer, reader = pair()
    writer.write([b"abc"])
    (first,) = reader.read([3])
    writer.write([b"xyz"])
    assert bytes(first) == b"abc"


def test_announced_memory_that_does_not_exist_is_refused() -> None:
    writer, reader = pair()
    with pytest.raises(ValueError, match="announces"):
        reader.read([1])
    writer.write([b"x"])
    with pytest.raises(ValueError, match="announces"):
        reader.read([-1, 1])


def test_a_truncated_arena_is_refused_without_a_crash() -> None:
    writer, reader = pair()
    sent = parts_of(5_000_000)
    writer.write(sent)
    program = [sys.executable, "-c", TRUNCATES, str(writer.fd)]
    peer = subprocess.run(program, pass_fds=[writer.fd], capture_output=True, text=True, check=True)
    assert peer.stdout.split() == ["refused", "refused"]
    assert [bytes(part) for part in reader.read([5_000_000])] == sent


def test_an_enormous_arena_does_no_harm() -> None:
    writer, reader = pair()
    os.ftruncate(reader.fd, 1 << 60)
    writer.write([b"abc"])
    assert bytes(reader.read([3])[0]) == b"abc"


def test_memory_that_can_be_truncated_is_refused() -> None:
    for fd in (os.memfd_create("open", os.MFD_ALLOW_SEALING), os.open("/dev/null", os.O_RDWR)):
        with pytest.raises(WireError, match="sealed"):
            Arena(fd)


def test_memory_without_seals_is_refused_without_leaking_a_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena.create()
    assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    unsealed = os.memfd_create("open")
    with pytest.raises(WireError, match="sealed"):
        Arena(unsealed)
    del arena
    assert len(os.listdir("/proc/self/fd")) == before
