"""Bytes that this process holds for clients that send requests slowly or read answers slowly."""

from typing import Protocol

from penstock.core.config import Limits

# At most this much of a message arrives before its size is known to be too large.
LAST_PART_BYTES = 1024 * 1024


class SlowClient(Protocol):
    def disconnect_client(self) -> None:
        """Drop the bytes that are held for this client, and disconnect the client."""


class HeldBytes:
    """Counts the bytes that this process holds for slow clients.

    Above `max_bytes`, clients are disconnected, in the order in which they began to hold bytes, so that stalled clients
    do not block others.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[SlowClient, int] = {}
        self.bytes = 0

    def hold(self, holder: SlowClient, size: int) -> None:
        """Add bytes for a client, and disconnect the clients that `add` returns, possibly this one."""
        for gone in self.add(holder, size):
            gone.disconnect_client()

    def add(self, holder: SlowClient, size: int) -> list[SlowClient]:
        """Add bytes for a client. Return the clients to disconnect; their bytes no longer count."""
        self._held[holder] = self._held.get(holder, 0) + size
        self.bytes += size
        gone: list[SlowClient] = []
        while self.bytes > self.max_bytes:
            longest = next(iter(self._held))
            self.drop(longest)
            gone.append(longest)
        return gone

    def take(self, holder: SlowClient, size: int) -> None:
        left = self._held.get(holder, 0) - size
        if left > 0:
            self._held[holder] = left
            self.bytes -= size
        else:
            self.drop(holder)

    def drop(self, holder: SlowClient) -> None:
        self.bytes -= self._held.pop(holder, 0)


class Transit:
    """Counts the bytes of requests that have not arrived completely, and of answers that clients have not read."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        held_bytes = max(limits.max_inflight_bytes, limits.max_message_bytes + LAST_PART_BYTES)
        self.incoming = HeldBytes(held_bytes)
        self.unsent = HeldBytes(held_bytes)
