"""Memory that two processes share: what is written is read, and neither side can harm the other with it."""

import fcntl
import os
import socket
import subprocess
import sys

import pytest

from penstock.core.errors import WireError
from penstock.wire.ipc import arena as arena_module
from penstock.wire.ipc.arena import Arena, receive_arenas, send_arenas

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
    """One arena, as each of two processes has it."""
    writer = Arena.create()
    return writer, Arena(os.dup(writer.fd))


def parts_of(*sizes: int) -> list[bytes]:
    return [bytes([i + 1]) * size for i, size in enumerate(sizes)]


@pytest.fixture
def keep_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(arena_module, "KEEP_BYTES", 2 * 1024 * 1024)
    return arena_module.KEEP_BYTES


def test_it_grows_under_its_reader_and_gives_back_what_was_rarely_needed(keep_bytes: int) -> None:
    writer, reader = pair()
    for sizes in ((), (0,), (1, 0, 3), (70_001,), (3 * keep_bytes + 1, 5), (7,), (keep_bytes, 1), (100, 200)):
        sent = parts_of(*sizes)
        writer.write(sent)
        assert [bytes(part) for part in reader.read(sizes)] == sent
        assert reader.held_bytes() <= keep_bytes


def test_what_was_read_stays_when_it_is_written_anew() -> None:
    writer, reader = pair()
    writer.write([b"abc"])
    (first,) = reader.read([3])
    writer.write([b"xyz"])
    assert bytes(first) == b"abc"


def test_memory_that_was_announced_but_is_not_there() -> None:
    writer, reader = pair()
    with pytest.raises(ValueError, match="were announced"):
        reader.read([1])
    writer.write([b"x"])
    with pytest.raises(ValueError, match="were announced"):
        reader.read([-1, 1])


def test_a_peer_that_truncates_it_is_refused_and_the_reader_lives() -> None:
    writer, reader = pair()
    sent = parts_of(5_000_000)
    writer.write(sent)
    program = [sys.executable, "-c", TRUNCATES, str(writer.fd)]
    peer = subprocess.run(program, pass_fds=[writer.fd], capture_output=True, text=True, check=True)
    assert peer.stdout.split() == ["refused", "refused"]
    assert [bytes(part) for part in reader.read([5_000_000])] == sent


def test_a_peer_that_makes_it_huge_harms_nobody() -> None:
    writer, reader = pair()
    os.ftruncate(reader.fd, 1 << 60)
    writer.write([b"abc"])
    assert bytes(reader.read([3])[0]) == b"abc"


def test_memory_that_could_be_truncated_is_not_taken() -> None:
    for fd in (os.memfd_create("open", os.MFD_ALLOW_SEALING), os.open("/dev/null", os.O_RDWR)):
        with pytest.raises(WireError, match="sealed"):
            Arena(fd)


def test_arenas_travel_over_a_socket_and_those_that_are_refused_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    here, there = socket.socketpair()
    with here, there:
        arenas = [Arena.create() for _ in range(3)]
        arenas[1].write([b"abc"])
        send_arenas(here, arenas)
        assert bytes(receive_arenas(there)[1].read([3])[0]) == b"abc"
        unsealed = os.memfd_create("open")
        socket.send_fds(here, [b"x"], [arenas[0].fd, unsealed, arenas[2].fd])
        os.close(unsealed)
        with pytest.raises(WireError, match="sealed"):
            receive_arenas(there)
        for arena in arenas:
            assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        del arenas, arena
    assert len(os.listdir("/proc/self/fd")) == before
