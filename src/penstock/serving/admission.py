"""What may come in: limits on one request and on all that are inside. Decides; never acts."""

from math import ceil
from typing import Protocol

from penstock.core.config import Limits
from penstock.core.errors import Draining, Overloaded, RequestTooLarge
from penstock.core.requests import InferRequest

# What may come of a message before it is seen to be too large.
LAST_PART_BYTES = 1024 * 1024


class Admission:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._shares: dict[str, list[int]] = {}  # of clients' addresses: requests and bytes inside
        self._most_requests = ceil(limits.client_share * limits.max_inflight_requests)
        # One request always fits.
        self._most_bytes = max(int(limits.client_share * limits.max_inflight_bytes), limits.max_message_bytes)
        self.inflight_bytes = 0
        self.inflight_requests = 0
        self.is_draining = False
        held_bytes = max(limits.max_inflight_bytes, limits.max_message_bytes + LAST_PART_BYTES)
        self.coming = HeldBytes(held_bytes)  # of requests that are not whole yet
        self.unsent = HeldBytes(held_bytes)  # of answers that their clients have not taken yet

    def admit(self, request: InferRequest) -> None:
        """Raises, or counts the request in; then `release` must follow."""
        limits, size = self.limits, request.size_bytes
        if self.is_draining:
            raise Draining("this server is shutting down; send the request to another")
        if size > limits.max_message_bytes:
            raise RequestTooLarge(
                f"the request has {size} bytes, over limits.max_message_bytes ({limits.max_message_bytes}): send less"
            )
        if self.inflight_requests >= limits.max_inflight_requests:
            raise Overloaded(f"{self.inflight_requests} requests are in flight already; try again later")
        if self.inflight_bytes + size > limits.max_inflight_bytes:
            raise Overloaded(f"{self.inflight_bytes} bytes of requests are in flight already; try again later")
        share = self._shares.get(request.client)
        if share is None:
            share = self._shares[request.client] = [0, 0]
        elif share[0] >= self._most_requests or share[1] + size > self._most_bytes:
            raise Overloaded(
                f"{share[0]} requests with {share[1]} bytes are in flight from your address already, its share "
                "(limits.client_share) of what this server takes; try again later"
            )
        share[0] += 1
        share[1] += size
        self.inflight_requests += 1
        self.inflight_bytes += size

    def check_room(self, size: int) -> None:
        """Before a large message is decoded: raises where it would be refused then."""
        if self.inflight_bytes + size > self.limits.max_inflight_bytes + LAST_PART_BYTES:
            raise Overloaded(f"{self.inflight_bytes} bytes of requests are in flight already; try again later")

    def check_rows(self, request: InferRequest) -> None:
        for tensor in request.inputs:
            if tensor.shape and tensor.shape[0] > self.limits.max_rows:
                raise RequestTooLarge(
                    f"input '{tensor.name}' has {tensor.shape[0]} rows, over limits.max_rows "
                    f"({self.limits.max_rows}): split the request"
                )

    def release(self, request: InferRequest) -> None:
        self.inflight_requests -= 1
        self.inflight_bytes -= request.size_bytes
        share = self._shares[request.client]
        share[0] -= 1
        share[1] -= request.size_bytes
        if not share[0]:
            del self._shares[request.client]


class SlowClient(Protocol):
    def give_up(self) -> None:
        """What it holds goes, and its client."""


class HeldBytes:
    """What is held for clients who are slow to send or to take the rest. Beyond its bound, who has held longest goes:
    one who comes at speed is not kept out by those who stall."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[SlowClient, int] = {}
        self.bytes = 0

    def hold(self, holder: SlowClient, size: int) -> None:
        """Has those give up who must go, the holder itself perhaps."""
        for gone in self.add(holder, size):
            gone.give_up()

    def add(self, holder: SlowClient, size: int) -> list[SlowClient]:
        """Returns who must go; they hold nothing any more."""
        self._held[holder] = self._held.get(holder, 0) + size
        self.bytes += size
        gone: list[SlowClient] = []
        while self.bytes > self.max_bytes:
            longest = next(iter(self._held))
            self.drop(longest)
            gone.append(longest)
        return gone

    def take(self, holder: SlowClient, size: int) -> None:
        """A part of what it holds is on its way; nothing where it holds nothing any more."""
        left = self._held.get(holder, 0) - size
        if left > 0:
            self._held[holder] = left
            self.bytes -= size
        else:
            self.drop(holder)

    def drop(self, holder: SlowClient) -> None:
        self.bytes -= self._held.pop(holder, 0)
