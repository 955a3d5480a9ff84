"""What may come in: limits on one request and on all that are inside. Decides; never acts."""

from penstock.core.config import Limits
from penstock.core.errors import Draining, Overloaded, RequestTooLarge
from penstock.core.requests import InferRequest


class Admission:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.inflight_bytes = 0
        self.inflight_requests = 0
        self.is_draining = False

    def admit(self, request: InferRequest) -> None:
        """Raises, or counts the request in; then `release` must follow."""
        limits, size = self._limits, request.size_bytes
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
        self.inflight_requests += 1
        self.inflight_bytes += size

    def check_rows(self, request: InferRequest) -> None:
        for tensor in request.inputs:
            if tensor.shape and tensor.shape[0] > self._limits.max_rows:
                raise RequestTooLarge(
                    f"input '{tensor.name}' has {tensor.shape[0]} rows, over limits.max_rows "
                    f"({self._limits.max_rows}): split the request"
                )

    def release(self, request: InferRequest) -> None:
        self.inflight_requests -= 1
        self.inflight_bytes -= request.size_bytes
