"""What the native front holds for clients, of which it tells nothing: who has to go so that it stays within bounds.

It takes whatever is sent, and has no bound on messages that are not whole nor on answers that nobody takes. What a
connection has sent, the kernel counts; what came of that as whole messages, we do. The rest is held.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.config import Limits

if TYPE_CHECKING:
    from penstock.wire.tcp_connections import ConnectionCounts

CALL_BYTES = 512  # of a call beside its message, at most, as long as its metadata is known already
BEGUN_BYTES = 33  # the least that every client begins with
PING_BYTES = 64  # what comes of a client that does nothing, between two looks


@dataclass(slots=True)
class _Client:
    since: float
    base_bytes: int = 0  # received when nothing was held
    received_bytes: int = 0
    sent_since: float = 0.0  # more than answers to pings
    taken_bytes: int = 0
    awaited_bytes: int = 0  # that it will have taken with the last of `answers`
    answers: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # by what it has taken with them


class FrontWatch:
    def __init__(self, limits: Limits, max_bytes: int, max_connections: int, idle_s: float) -> None:
        self._limits = limits
        self._max_bytes = max_bytes
        self._max_connections = max_connections
        self._idle_s = idle_s
        self._clients: dict[str, _Client] = {}
        self.whole_bytes: dict[str, int] = {}  # by peer: of messages since nothing was held, and CALL_BYTES for each

    @property
    def is_waiting(self) -> bool:
        """Whether answers are on their way that count."""
        return any(client.answers for client in self._clients.values())

    def knows(self, peer: str) -> bool:
        return peer in self._clients

    def answered(self, peer: str, size_bytes: int, taken: Callable[[], None]) -> None:
        """A large answer is on its way; `taken` is called when it has arrived, or its client is gone."""
        client = self._clients.get(peer)
        if client is None:
            taken()
            return
        client.awaited_bytes = max(client.awaited_bytes, client.taken_bytes) + size_bytes
        client.answers.append((client.awaited_bytes, taken))

    def look(self, connections: Mapping[str, "ConnectionCounts"], unseen: int, now: float) -> set[str]:
        """`unseen`: calls that the front has and we have not. Returns whose connections must go."""
        self._see(connections, now)
        if unseen <= 0:  # so all that came is whole
            self.whole_bytes.clear()
            for client in self._clients.values():
                client.base_bytes = client.received_bytes
        held = {peer: self._held(peer, client) for peer, client in self._clients.items()}
        return self._beyond() | self._silent(connections, now) | self._stalled(held, now) | self._too_much(held)

    def _see(self, connections: Mapping[str, "ConnectionCounts"], now: float) -> None:
        for peer in self._clients.keys() - connections.keys():
            for _, taken in self._clients.pop(peer).answers:
                taken()
        for peer in self.whole_bytes.keys() - connections.keys():
            del self.whole_bytes[peer]
        for peer, counts in connections.items():
            client = self._clients.setdefault(peer, _Client(now, sent_since=now))
            if counts.received_bytes - client.received_bytes > PING_BYTES:
                client.sent_since = now
            client.received_bytes, client.taken_bytes = counts.received_bytes, counts.taken_bytes
            while client.answers and client.answers[0][0] <= client.taken_bytes:
                client.answers.pop(0)[1]()

    def _held(self, peer: str, client: _Client) -> int:
        return client.received_bytes - client.base_bytes - self.whole_bytes.get(peer, 0)

    def _beyond(self) -> set[str]:
        """Those who came last, where there are too many."""
        return set(list(self._clients)[self._max_connections :])

    def _silent(self, connections: Mapping[str, "ConnectionCounts"], now: float) -> set[str]:
        """Those who have not begun, and those who have not said anything for long."""
        return {
            peer
            for peer, client in self._clients.items()
            if (client.received_bytes < BEGUN_BYTES and now - client.since > self._limits.header_timeout_s)
            or connections[peer].silent_s > self._idle_s
        }

    def _stalled(self, held: Mapping[str, int], now: float) -> set[str]:
        """Those who have begun to say something and do not go on."""
        patience_s = self._limits.message_timeout_s
        return {peer for peer, size in held.items() if size > 0 and now - self._clients[peer].sent_since > patience_s}

    def _too_much(self, held: Mapping[str, int]) -> set[str]:
        """Those of whom most is held, until half of what may be is left."""
        left = sum(size for size in held.values() if size > 0)
        gone: set[str] = set()
        if left <= self._max_bytes:
            return gone
        for peer in sorted(held, key=lambda peer: -held[peer]):
            if left <= self._max_bytes // 2:
                break
            gone.add(peer)
            left -= held[peer]
        return gone
