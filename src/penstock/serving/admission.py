"""Admission: limits on each request and on all requests in flight. Pure: no I/O."""

from math import ceil

from penstock.core.config import Limits
from penstock.core.errors import Draining, Overloaded, RequestTooLarge
from penstock.core.requests import InferRequest
from penstock.endpoints.held_bytes import LAST_PART_BYTES, Transit


class Admission(Transit):
    """Admits requests up to the limits, and counts the requests and bytes in flight."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._client_shares: dict[str, list[int]] = {}  # requests and bytes in flight, by client address
        self._most_requests = ceil(limits.client_share * limits.max_inflight_requests)
        # A client may always send one request of the largest size.
        self._most_bytes = max(int(limits.client_share * limits.max_inflight_bytes), limits.max_message_bytes)
        self.inflight_bytes = 0
        self.inflight_requests = 0
        self.is_draining = False

    def admit(self, request: InferRequest) -> None:
        """Count the request as in flight, or raise Draining, RequestTooLarge or Overloaded; `release` ends it."""
        limits, size = self.limits, request.size_bytes
        if self.is_draining:
            raise Draining("this server is shutting down; send the request to another server")
        if size > limits.max_message_bytes:
            raise RequestTooLarge(
                f"the request has {size} bytes, over limits.max_message_bytes ({limits.max_message_bytes}): send less"
            )
        if self.inflight_requests >= limits.max_inflight_requests:
            raise Overloaded(f"{self.inflight_requests} requests are already in flight; try again later")
        if self.inflight_bytes + size > limits.max_inflight_bytes:
            raise Overloaded(f"{self.inflight_bytes} bytes of requests are already in flight; try again later")
        share = self._client_shares.get(request.client)
        if share is None:
            share = self._client_shares[request.client] = [0, 0]
        elif share[0] >= self._most_requests or share[1] + size > self._most_bytes:
            raise Overloaded(
                f"{share[0]} requests with {share[1]} bytes from your address are already in flight, the limit for one "
                "address (limits.client_share); try again later"
            )
        share[0] += 1
        share[1] += size
        self.inflight_requests += 1
        self.inflight_bytes += size

    def check_room(self, size: int) -> None:
        """Raise Overloaded if a message of this size would be refused; call it before decoding a large message."""
        if self.inflight_bytes + size > self.limits.max_inflight_bytes + LAST_PART_BYTES:
            raise Overloaded(f"{self.inflight_bytes} bytes of requests are already in flight; try again later")

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
        share = self._client_shares[request.client]
        share[0] -= 1
        share[1] -= request.size_bytes
        if not share[0]:
            del self._client_shares[request.client]
