"""A manager's HTTP door: bodies of any size, as long as they move; and errors as its administration tells them."""

from math import inf
from typing import Any

from penstock.core.errors import PenstockError
from penstock.gateway import statuses
from penstock.gateway.http.bounded import BoundedProtocol, Phase
from penstock.gateway.turnstile import Turnstile

MAX_CONNECTIONS = 256
LIMITS = {"message_timeout_s": inf}


class ManagerProtocol(BoundedProtocol):
    """A body is not held, but written as it comes: it may have any size, and take as long as it moves."""

    def hold(self, size: int) -> bool:
        return self._phase is not Phase.REFUSED

    def body_of(self, error: PenstockError) -> object:
        return {"error": {"code": error.code, "message": statuses.told(error)}}


def websocket(turnstile: Turnstile, **options: Any) -> Any:
    from penstock.gateway.streams.websocket_protocol import StreamProtocol  # few ever watch

    return StreamProtocol(turnstile, **options)
