"""A manager's HTTP connections: bodies of any size and duration, and errors in the format of the administration API."""

from math import inf
from typing import Any

from penstock.core.errors import PenstockError
from penstock.endpoints import statuses
from penstock.endpoints.connection_limits import ConnectionLimits
from penstock.endpoints.http.bounded_protocol import BoundedProtocol, Phase

MAX_CONNECTIONS = 256
LIMITS = {"message_timeout_s": inf}


class ManagerProtocol(BoundedProtocol):
    """A connection whose bodies are written to storage as they arrive, so that size and duration have no limit."""

    def hold_body(self, size: int) -> bool:
        return self._phase is not Phase.REFUSED

    def make_error_body(self, error: PenstockError) -> object:
        return {"error": {"code": error.code, "message": statuses.make_public_message(error)}}


def create_websocket_protocol(connection_limits: ConnectionLimits, **options: Any) -> Any:
    from penstock.endpoints.http.websocket_protocol import StreamProtocol  # deferred: rarely needed

    return StreamProtocol(connection_limits, **options)
