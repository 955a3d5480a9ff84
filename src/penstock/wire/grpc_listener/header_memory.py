"""Decides which connections to close when compressed headers fill a gRPC server's memory.

Compressed HTTP/2 headers can be thousands of times larger when decoded, and gRPC decodes all headers before it refuses
the call (docs/decisions/0046). The decoded size is not visible, but an attack has two signs: the process grows by much
more than its clients send, and most bytes that a connection sends do not belong to messages.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import NamedTuple

GROWTH_BYTES = 32 * 1024 * 1024  # growth in one window that is checked
LARGE_GROWTH_BYTES = 160 * 1024 * 1024  # too much growth in one window; a cut takes effect some 100 MiB later
AMPLIFIED = 3  # growth per received byte that is suspicious: incomplete messages need less
COPIES = 4  # growth per byte of a large, complete message until its answer is sent
LARGE_BYTES = 1024 * 1024  # smaller messages do not make a process grow noticeably
WINDOW_S = 5.0
FEW_BYTES = 32 * 1024  # that a connection may send in one window beside its messages
CALL_BYTES = 256  # that nearly all clients send at most with a call, in addition to its message
FRAME_BYTES = 32  # that a client sends with a message of a stream, in addition to the message


class ArrivedMessages:
    """Counts, by connection, the bytes of whole messages; lists the connections that are sending a message."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}  # by peer, in gRPC's notation
        self.large_bytes = 0  # of large messages, of all peers
        self.awaited: Counter[str] = Counter()  # by peer: awaited messages of admitted callers that may be large

    def add(self, peer: str, size_bytes: int, is_call: bool) -> None:
        """Count a message. `is_call`: the message is the only one of its call, not a message of a stream."""
        self.bytes[peer] = self.bytes.get(peer, 0) + size_bytes + (CALL_BYTES if is_call else FRAME_BYTES)
        if size_bytes >= LARGE_BYTES:
            self.large_bytes += size_bytes

    @contextmanager
    def awaiting(self, peer: str) -> Iterator[None]:
        self.awaited[peer] += 1
        try:
            yield
        finally:
            self.awaited[peer] -= 1
            if not self.awaited[peer]:
                del self.awaited[peer]


class Traffic(NamedTuple):
    """The bytes that the clients of a process have sent so far, by peer."""

    received: Mapping[str, int]  # bytes of all kinds
    messages: Mapping[str, int]  # bytes of whole messages
    awaited: Set[str] = frozenset()  # peers with an unfinished message that may be large
    large_bytes: int = 0  # of large messages, of all peers


class HeaderMemory:
    def __init__(self) -> None:
        self._since = 0.0
        self._held_bytes: int | None = None  # the process's memory when the window began
        self._base: dict[str, int] = {}  # by peer: the unexplained bytes when the window began
        self._large_bytes = [0, 0]  # of large messages when the window before this one began, and this one

    def growth_bytes(self, held_bytes: int) -> int:
        """Return the bytes by which the process has grown in the current window of time."""
        return 0 if self._held_bytes is None else held_bytes - self._held_bytes

    def check(self, held_bytes: int, traffic: Traffic, now: float) -> set[str]:
        """Return the peers whose connections must be closed. `held_bytes` is the memory of the process."""
        unexplained = {peer: size - traffic.messages.get(peer, 0) for peer, size in traffic.received.items()}
        sent = {peer: size - self._base.get(peer, 0) for peer, size in unexplained.items()}
        # A large message makes the process grow until its answer is sent, perhaps in the next window.
        growth_bytes = self.growth_bytes(held_bytes) - COPIES * (traffic.large_bytes - self._large_bytes[0])
        cut = _find_attackers(growth_bytes, sent, traffic.awaited)
        if cut:  # keep the base memory, so that further attackers are cut without further growth
            self._since, self._base = now, unexplained
        elif self._held_bytes is None or now - self._since >= WINDOW_S or held_bytes < self._held_bytes:
            if self._held_bytes is None or now - self._since >= WINDOW_S:
                self._large_bytes = [self._large_bytes[1], traffic.large_bytes]
            self._since, self._held_bytes, self._base = now, held_bytes, unexplained
        return cut


def _find_attackers(growth_bytes: int, sent: Mapping[str, int], awaited: Set[str]) -> set[str]:
    """Return the peers that sent many bytes outside messages, if these bytes explain the growth of memory."""
    total = sum(size for size in sent.values() if size > FEW_BYTES)
    coming = sum(size for peer, size in sent.items() if peer in awaited)
    if growth_bytes < GROWTH_BYTES:
        return set()
    if growth_bytes < AMPLIFIED * total and growth_bytes - coming < LARGE_GROWTH_BYTES:
        return set()
    return {peer for peer, size in sent.items() if size > FEW_BYTES}
