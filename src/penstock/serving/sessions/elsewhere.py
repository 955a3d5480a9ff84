"""Ordered sessions at a door that can own none: a worker's own. A gateway does."""

from collections.abc import AsyncGenerator, Awaitable

from penstock.core.blocks import BlockDescription
from penstock.core.errors import SessionError
from penstock.core.requests import InferRequest, InferResponse
from penstock.serving.sessions.ordered import OrderedSessions
from penstock.serving.sessions.runs import Run, Stream


class SessionsElsewhere(OrderedSessions):
    def run(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run
    ) -> Awaitable[InferResponse]:
        raise _elsewhere()

    def stream(
        self, block: BlockDescription, request: InferRequest, deadline: float, stream: Stream
    ) -> AsyncGenerator[InferResponse, None]:
        raise _elsewhere()


def _elsewhere() -> SessionError:
    return SessionError(
        "a session with an order has one owner, which is a gateway: call one, or have Discover name it (is_ordered)"
    )
