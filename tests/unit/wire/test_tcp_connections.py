"""The kernel's counts of a port's TCP connections, and closing them."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.wire.tcp_connections import (
    OPEN_FILES_FOLDER,
    ConnectionCounter,
    abort_peer_connections,
    can_count,
    close_connection,
    close_peer_connections,
    close_port_connections,
    iterate_own_sockets,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


@pytest.fixture
def pairs(listening: socket.socket) -> Iterator[list[Pair]]:
    """Three connections, each as the client's and the server's socket."""
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(listening.getsockname())) for _ in range(3)]
        yield [(client, stack.enter_context(listening.accept()[0])) for client in clients]


def peer_of(pair: Pair) -> str:
    address, port = pair[0].getsockname()
    return f"ipv4:{address}:{port}"


def is_closed(pair: Pair) -> bool:
    pair[0].settimeout(0.01)
    try:
        return pair[0].recv(1) == b""
    except TimeoutError:
        return False


def test_received_and_acknowledged_bytes_are_counted(listening: socket.socket, pairs: list[Pair]) -> None:
    assert can_count()
    counter = ConnectionCounter(listening.getsockname()[1])
    client, ours = pairs[0]
    client.sendall(bytes(1000))
    assert len(ours.recv(1000, socket.MSG_WAITALL)) == 1000
    ours.sendall(bytes(500))
    assert len(client.recv(500, socket.MSG_WAITALL)) == 500
    deadline = time.monotonic() + 10
    while (found := counter.count())[peer_of(pairs[0])].taken_bytes < 500 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(found) == {peer_of(pair) for pair in pairs}
    assert [found[peer_of(pair)].received_bytes for pair in pairs] == [1000, 0, 0]
    assert found[peer_of(pairs[0])].taken_bytes == 500


def test_the_seconds_since_the_last_byte_are_counted(listening: socket.socket, pairs: list[Pair]) -> None:
    counter = ConnectionCounter(listening.getsockname()[1])
    (silent, _), (sending, server), _ = pairs
    started = time.monotonic()
    silent.sendall(b"x")
    time.sleep(0.3)
    sending.sendall(b"x")
    server.recv(1)
    found = counter.count()
    most_s = time.monotonic() - started + 0.1
    assert 0.2 < found[peer_of(pairs[0])].silent_s < most_s
    assert found[peer_of(pairs[1])].silent_s < most_s - 0.2


def test_descriptors_that_were_reused_are_not_counted(listening: socket.socket, pairs: list[Pair]) -> None:
    counter = ConnectionCounter(listening.getsockname()[1])
    assert len(counter.count()) == 3
    number = pairs[0][1].fileno()
    one, other = socket.socketpair()
    with one, other:
        os.dup2(other.fileno(), number)
        assert set(counter.count()) == {peer_of(pair) for pair in pairs[1:]}


def test_connections_are_closed_by_peer_or_by_port(listening: socket.socket, pairs: list[Pair]) -> None:
    close_connection(peer_of(pairs[0]))
    close_peer_connections(["unix:", peer_of(pairs[1]).replace("ipv4:127.0.0.1", "ipv6:%5B::ffff:127.0.0.1%5D")])
    assert [is_closed(pair) for pair in pairs] == [True, True, False]
    close_port_connections(listening.getsockname()[1])
    assert is_closed(pairs[2])


def test_known_connections_are_counted_while_no_descriptor_is_free(listening: socket.socket, pairs: list[Pair]) -> None:
    counter = ConnectionCounter(listening.getsockname()[1])
    before = counter.count()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir(OPEN_FILES_FOLDER)
        found = counter.count()
        with ExitStack() as stack:
            own = list(iterate_own_sockets(stack))
        close_port_connections(listening.getsockname()[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found.keys() == before.keys()
    assert not own


def test_aborting_a_connection_discards_what_arrived(listening: socket.socket, pairs: list[Pair]) -> None:
    for client, _ in pairs[:2]:
        client.sendall(bytes(100_000))
    ours = pairs[0][1]
    assert ours.recv(1, socket.MSG_PEEK) == b"\0"
    abort_peer_connections([peer_of(pairs[0])])
    with pytest.raises(OSError, match=r"not connected|reset"):
        ours.recv(1)
    pairs[0][0].settimeout(20)
    with pytest.raises(ConnectionResetError):
        pairs[0][0].recv(1)
    assert len(pairs[1][1].recv(100_000, socket.MSG_WAITALL)) == 100_000
