"""The connections that clients have to a port of this process: what the kernel has counted of each, and its end.

For who has none of its own by hand: gRPC's servers tell of none, and close none.
"""

import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

FILES = "/proc/self/fd"
INFO_BYTES = 256
_LAST_RECEIVED = struct.Struct("=I")  # struct tcp_info, in milliseconds
_LAST_RECEIVED_AT = 52
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120


class ConnectionCounts(NamedTuple):
    received_bytes: int  # of the client, since it came
    taken_bytes: int  # by the client
    silent_s: float  # since its last byte


def can_count() -> bool:
    """Whether this system says what was received."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir(FILES):
        return False
    with socket.socket() as opened:
        return len(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)) >= _ACKED_AT + 16


class ConnectionCounter:
    def __init__(self, port: int) -> None:
        self._port = port
        self._peers: dict[str, str] = {}  # by file and inode; empty: of something else

    def count(self) -> dict[str, ConnectionCounts]:
        """By peer, as gRPC writes it."""
        found: dict[str, ConnectionCounts] = {}
        peers: dict[str, str] = {}
        for name in os.listdir(FILES):
            with suppress(OSError):
                place = os.readlink(f"{FILES}/{name}")
                if not place.startswith("socket:"):
                    continue
                known = self._peers.get(f"{name} {place}")
                peer = peers[f"{name} {place}"] = self._peer(int(name)) if known is None else known
                if peer:
                    found[peer] = _counts(int(name))
        self._peers = peers
        return found

    def _peer(self, file: int) -> str:
        with socket.socket(fileno=os.dup(file)) as opened:
            if not _is_tcp(opened) or opened.getsockname()[1] != self._port:
                return ""
            try:
                address, port = opened.getpeername()[:2]
            except OSError:  # it listens, or its client left
                return ""
        return f"ipv4:{address}:{port}" if opened.family == socket.AF_INET else f"ipv6:[{address}]:{port}"


def _counts(file: int) -> ConnectionCounts:
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, file)  # nothing is asked of a file that it may be
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    finally:
        borrowed.detach()
    taken, received = _ACKED_AND_RECEIVED.unpack_from(info, _ACKED_AT)
    return ConnectionCounts(received, taken, _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT)[0] / 1000)


# --- their end


def cut_connection(peer: str) -> None:
    """Closes a client's connection; what it has not taken goes with it."""
    cut_peers([peer])


def cut_peers(peers: Collection[str]) -> None:
    meant = {_place(peer) for peer in peers if peer.startswith("ip")}
    # gRPC listens for both families at once, and tells an address of the older as it is.
    _cut(lambda ours, theirs: (theirs[0].removeprefix("::ffff:"), theirs[1]) in meant)


def cut_connections(port: int) -> None:
    """Closes all that clients have opened to that port."""
    _cut(lambda ours, theirs: ours[1] == port)


def _place(peer: str) -> tuple[str, int]:
    address, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return address.strip("[]").removeprefix("::ffff:"), int(port)


def _cut(is_meant: Callable[[Any, Any], bool]) -> None:
    """By the addresses of both ends. First all are found: until the last is closed there is not much time."""
    with ExitStack() as stack:
        ours = own_sockets(stack)
        found = [
            each
            for each in ours
            if _is_tcp(each) and (theirs := _other_end(each)) and is_meant(each.getsockname(), theirs)
        ]
        for each in found:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def own_sockets(stack: ExitStack) -> Iterator[socket.socket]:
    """Those of this process, whoever opened them; `stack` closes what was lent of them."""
    for name in os.listdir(FILES) if os.path.exists(FILES) else ():
        with suppress(OSError):
            if os.readlink(f"{FILES}/{name}").startswith("socket:"):
                yield stack.enter_context(socket.socket(fileno=os.dup(int(name))))


def _other_end(opened: socket.socket) -> Any:
    """None: there is none."""
    try:
        return opened.getpeername()
    except OSError:
        return None


def _is_tcp(opened: socket.socket) -> bool:
    return opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
