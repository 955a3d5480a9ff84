"""Counts the bytes of the TCP connections that clients have to a port of this process, and closes connections.

gRPC's servers neither list nor close their connections, so this file finds the sockets among the process's open files.
The counts are read from TCP_INFO, whose offsets Python does not define; tests/unit/wire/test_tcp_connections.py fails
if a kernel changes the offsets.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

OPEN_FILES_FOLDER = "/proc/self/fd"
INFO_BYTES = 256
# In the kernel's struct tcp_info: tcpi_last_data_recv, in milliseconds; tcpi_bytes_acked and tcpi_bytes_received.
_LAST_RECEIVED = struct.Struct("=I")
_LAST_RECEIVED_OFFSET = 52
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_OFFSET = 120


class ConnectionCounts(NamedTuple):
    """The kernel's figures for one connection."""

    received_bytes: int  # from the client, since it connected
    taken_bytes: int  # sent to the client and acknowledged by it
    silent_s: float  # since the client's last byte


def can_count() -> bool:
    """Return whether this system's kernel counts the bytes of TCP connections."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir(OPEN_FILES_FOLDER):
        return False
    with socket.socket() as opened:
        return len(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)) >= _ACKED_OFFSET + 16


class ConnectionCounter:
    """Counts the bytes of all connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._peers: dict[str, str] = {}  # by descriptor and inode; an empty peer is no connection to the port

    def count(self) -> dict[str, ConnectionCounts]:
        """Return the counts by peer address, in gRPC's notation."""
        found: dict[str, ConnectionCounts] = {}
        peers: dict[str, str] = {}
        # If no descriptor is free, no connection can be new, so the known connections are complete.
        for name in _list_open_files() or [known.partition(" ")[0] for known in self._peers]:
            with suppress(OSError):
                place = os.readlink(f"{OPEN_FILES_FOLDER}/{name}")
                if not place.startswith("socket:"):
                    continue
                known = self._peers.get(f"{name} {place}")
                peer = peers[f"{name} {place}"] = self._find_peer(int(name)) if known is None else known
                if peer:
                    found[peer] = _read_counts(int(name))
        self._peers = peers
        return found

    def _find_peer(self, file: int) -> str:
        with socket.socket(fileno=os.dup(file)) as opened:
            if not _is_tcp(opened) or opened.getsockname()[1] != self._port:
                return ""
            try:
                address, port = opened.getpeername()[:2]
            except OSError:  # the socket listens, or its client left
                return ""
        address = address.removeprefix("::ffff:")  # gRPC reports IPv4 peers of an IPv6 socket like this
        return f"ipv6:[{address}]:{port}" if ":" in address else f"ipv4:{address}:{port}"


def _read_counts(file: int) -> ConnectionCounts:
    # Giving family and type keeps Python from querying them with system calls.
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, file)
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    finally:
        borrowed.detach()
    taken, received = _ACKED_AND_RECEIVED.unpack_from(info, _ACKED_OFFSET)
    return ConnectionCounts(received, taken, _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_OFFSET)[0] / 1000)


# --- closing


def close_connection(peer: str) -> None:
    """Close a client's connection. Bytes that the client has not received are lost."""
    close_peer_connections([peer])


def close_peer_connections(peers: Collection[str]) -> None:
    addresses = {_parse_peer(peer) for peer in peers if peer.startswith("ip")}
    # gRPC listens for IPv4 and IPv6 with one socket, and reports IPv4 peers without the prefix.
    _close_matching(lambda ours, theirs: (theirs[0].removeprefix("::ffff:"), theirs[1]) in addresses)


def abort_peer_connections(peers: Collection[str]) -> None:
    """Reset these clients' connections, and discard received bytes that were not read yet."""
    addresses = {_parse_peer(peer) for peer in peers if peer.startswith("ip")}
    _close_matching(lambda ours, theirs: (theirs[0].removeprefix("::ffff:"), theirs[1]) in addresses, _abort)


def close_port_connections(port: int) -> None:
    _close_matching(lambda ours, theirs: ours[1] == port)


def _shut_down(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def _abort(connection: socket.socket) -> None:
    # Connecting to AF_UNSPEC discards the bytes in the kernel's buffer. Python's `connect` rejects such an address.
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    ctypes.CDLL(None).connect(connection.fileno(), nowhere, len(nowhere))


def _parse_peer(peer: str) -> tuple[str, int]:
    address, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return address.strip("[]").removeprefix("::ffff:"), int(port)


def _close_matching(
    matches: Callable[[Any, Any], bool], close_socket: Callable[[socket.socket], None] = _shut_down
) -> None:
    """Close the connections for which `matches`, called with the addresses of both ends, returns True.

    All connections are found before the first is closed, so that they close at nearly the same time.
    """
    with ExitStack() as stack:
        ours = iterate_own_sockets(stack)
        found = [
            each
            for each in ours
            if _is_tcp(each) and (theirs := _read_peer_address(each)) and matches(each.getsockname(), theirs)
        ]
        for each in found:
            with suppress(OSError):
                close_socket(each)


def _list_open_files() -> list[str]:
    """Return the numbers of this process's open files; empty if /proc is missing or no file can be opened."""
    try:
        return os.listdir(OPEN_FILES_FOLDER)
    except OSError:
        return []


def iterate_own_sockets(stack: ExitStack) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process, also of libraries' sockets; `stack` closes the duplicates."""
    for name in _list_open_files():
        with suppress(OSError):
            if os.readlink(f"{OPEN_FILES_FOLDER}/{name}").startswith("socket:"):
                yield stack.enter_context(socket.socket(fileno=os.dup(int(name))))


def _read_peer_address(connection: socket.socket) -> Any:
    """Return the peer's address, or None if the socket is not connected."""
    try:
        return connection.getpeername()
    except OSError:
        return None


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
