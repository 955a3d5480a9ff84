"""Choose the connections to cut so that the native server's memory stays within limits.

The native server does not limit partial messages and unread answers, and does not report them. The kernel counts the
bytes that a connection has received, and this module counts the bytes of whole messages. The native server holds the
difference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.config import Limits

if TYPE_CHECKING:
    from penstock.wire.tcp_connections import ConnectionCounts

MAX_CALL_BYTES = 512  # a call's bytes other than its message, at most, if HTTP/2 has compressed its metadata
MIN_PREFACE_BYTES = 33  # every client sends at least this many bytes first
MAX_PING_BYTES = 64  # received from an idle client between two checks


@dataclass(slots=True)
class _Client:
    since: float
    base_bytes: int = 0  # received when the server last held nothing
    received_bytes: int = 0
    sent_since: float = 0.0  # when the client last sent more than pings
    taken_bytes: int = 0
    awaited_bytes: int = 0  # total bytes that the client will have read after the last of `answers`
    answers: list[tuple[int, Callable[[], None]]] = field(
        default_factory=list
    )  # with the bytes that the client has read by then


class NativeLimits:
    """Connections of the native server, with the bytes that it holds for each."""

    def __init__(self, limits: Limits, max_bytes: int, max_connections: int, idle_s: float) -> None:
        self._limits = limits
        self._max_bytes = max_bytes
        self._max_connections = max_connections
        self._idle_s = idle_s
        self._clients: dict[str, _Client] = {}
        self.whole_bytes: dict[
            str, int
        ] = {}  # by peer: of whole messages since the server last held nothing, and CALL_BYTES for each

    @property
    def is_waiting(self) -> bool:
        """Return whether large answers are being sent."""
        return any(client.answers for client in self._clients.values())

    def is_known(self, peer: str) -> bool:
        return peer in self._clients

    def track_answer(self, peer: str, size_bytes: int, on_taken: Callable[[], None]) -> None:
        """Note that a large answer is being sent; call `on_taken` when it has arrived or the client is gone."""
        client = self._clients.get(peer)
        if client is None:
            on_taken()
            return
        client.awaited_bytes = max(client.awaited_bytes, client.taken_bytes) + size_bytes
        client.answers.append((client.awaited_bytes, on_taken))

    def check(self, connections: Mapping[str, "ConnectionCounts"], undelivered: int, now: float) -> set[str]:
        """Return the peers to disconnect. `undelivered`: how many calls the native server has not delivered."""
        self._update_clients(connections, now)
        if undelivered <= 0:  # all received bytes belong to whole messages
            self.whole_bytes.clear()
            for client in self._clients.values():
                client.base_bytes = client.received_bytes
        held = {peer: self._compute_held_bytes(peer, client) for peer, client in self._clients.items()}
        return (
            self._find_excess()
            | self._find_silent(connections, now)
            | self._find_stalled(held, now)
            | self._find_largest(held)
        )

    def _update_clients(self, connections: Mapping[str, "ConnectionCounts"], now: float) -> None:
        for peer in self._clients.keys() - connections.keys():
            for _, taken in self._clients.pop(peer).answers:
                taken()
        for peer in self.whole_bytes.keys() - connections.keys():
            del self.whole_bytes[peer]
        for peer, counts in connections.items():
            client = self._clients.setdefault(peer, _Client(now, sent_since=now))
            if counts.received_bytes - client.received_bytes > MAX_PING_BYTES:
                client.sent_since = now
            client.received_bytes, client.taken_bytes = counts.received_bytes, counts.taken_bytes
            while client.answers and client.answers[0][0] <= client.taken_bytes:
                client.answers.pop(0)[1]()

    def _compute_held_bytes(self, peer: str, client: _Client) -> int:
        return client.received_bytes - client.base_bytes - self.whole_bytes.get(peer, 0)

    def _find_excess(self) -> set[str]:
        """Return the newest peers beyond the limit on connections."""
        return set(list(self._clients)[self._max_connections :])

    def _find_silent(self, connections: Mapping[str, "ConnectionCounts"], now: float) -> set[str]:
        """Return the peers that sent no HTTP/2 preface within the time limit, or sent nothing for a long time."""
        return {
            peer
            for peer, client in self._clients.items()
            if (client.received_bytes < MIN_PREFACE_BYTES and now - client.since > self._limits.header_timeout_s)
            or connections[peer].silent_s > self._idle_s
        }

    def _find_stalled(self, held_bytes: Mapping[str, int], now: float) -> set[str]:
        """Return the peers that started a message and stopped sending."""
        patience_s = self._limits.message_timeout_s
        return {
            peer for peer, size in held_bytes.items() if size > 0 and now - self._clients[peer].sent_since > patience_s
        }

    def _find_largest(self, held_bytes: Mapping[str, int]) -> set[str]:
        """Return the peers that hold most memory, if all peers together exceed the memory limit.

        Without the returned peers, the others hold at most half of the limit.
        """
        left = sum(size for size in held_bytes.values() if size > 0)
        gone: set[str] = set()
        if left <= self._max_bytes:
            return gone
        for peer in sorted(held_bytes, key=lambda peer: -held_bytes[peer]):
            if left <= self._max_bytes // 2:
                break
            gone.add(peer)
            left -= held_bytes[peer]
        return gone
