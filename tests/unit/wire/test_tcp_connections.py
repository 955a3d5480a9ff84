"""What the kernel counts of connections, and their end."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.wire.tcp_connections import ConnectionCounter, can_count, cut_connection, cut_connections, cut_peers

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


@pytest.fixture
def pairs(listening: socket.socket) -> Iterator[list[Pair]]:
    """Three connections: their clients' ends and ours."""
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


def test_what_was_received_and_taken_is_counted(listening: socket.socket, pairs: list[Pair]) -> None:
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


def test_files_that_are_others_now_are_not_counted(listening: socket.socket, pairs: list[Pair]) -> None:
    counter = ConnectionCounter(listening.getsockname()[1])
    assert len(counter.count()) == 3
    number = pairs[0][1].fileno()
    one, other = socket.socketpair()
    with one, other:
        os.dup2(other.fileno(), number)
        assert set(counter.count()) == {peer_of(pair) for pair in pairs[1:]}


def test_connections_are_cut_by_their_peers_or_their_port(listening: socket.socket, pairs: list[Pair]) -> None:
    cut_connection(peer_of(pairs[0]))
    cut_peers(["unix:", peer_of(pairs[1]).replace("ipv4:127.0.0.1", "ipv6:%5B::ffff:127.0.0.1%5D")])
    assert [is_closed(pair) for pair in pairs] == [True, True, False]
    cut_connections(listening.getsockname()[1])
    assert is_closed(pairs[2])
