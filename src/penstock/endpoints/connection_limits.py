"""Limits on connections: in total, per client address, and by the number of files that this process may open."""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable

from penstock.core.config import Limits
from penstock.core.errors import Overloaded, PenstockError
from penstock.endpoints.held_bytes import Transit

# Files other than connections: workers' sockets, models, metrics, files of libraries.
RESERVED_FILES = 1024
UNLIMITED_FILES = 1024 * 1024  # if the system has no limit
MAX_UNCOUNTED_BYTES = (
    16 * 1024
)  # smaller messages are not counted while they arrive, because only a million of them would matter


class ConnectionLimits:
    """Counts and limits HTTP and WebSocket connections, in total and per client address."""

    def __init__(
        self,
        limits: Limits,
        transit: Transit,
        on_rejected: Callable[[PenstockError], None],
        max_connections: int,
        is_behind_edge: bool = False,
    ) -> None:
        """Start without connections. `is_behind_edge`: only the edge connects, and its requests name the clients."""
        self.limits = limits
        self.is_behind_edge = is_behind_edge
        self._transit = transit
        self.incoming = transit.incoming
        self.unsent = transit.unsent
        self.on_rejected = on_rejected
        self._max_connections = max_connections
        self._max_per_address = (
            max_connections if is_behind_edge else max(1, int(limits.client_share * max_connections))
        )
        self._count_by_address: Counter[str] = Counter()
        self._count = 0

    def copy_uncounted(self) -> "ConnectionLimits":
        """Return the same limits with separate counts, for connections during their TLS handshake."""
        return ConnectionLimits(self.limits, self._transit, self.on_rejected, self._max_connections)

    def try_open(self, address: str) -> bool:
        """Count a connection, or return False if there are too many. Call `count_close` when the connection ends."""
        if self._count >= self._max_connections or self._count_by_address[address] >= self._max_per_address:
            return False
        self._count += 1
        self._count_by_address[address] += 1
        return True

    def count_close(self, address: str) -> None:
        self._count -= 1
        self._count_by_address[address] -= 1
        if not self._count_by_address[address]:
            del self._count_by_address[address]


class SlowConnection(asyncio.Protocol):
    """A connection that is aborted if the server holds too many bytes that the client does not read."""

    transport: asyncio.Transport
    _connection_limits: ConnectionLimits

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connection_limits.unsent.hold(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connection_limits.unsent.drop(self)

    def disconnect_client(self) -> None:
        self.transport.abort()

    def refuse(self, error: PenstockError) -> None:
        """Refuse the message that is arriving, and read nothing more."""
        raise NotImplementedError

    def hold_incoming(self, size: int) -> None:
        """Count bytes of a message that is arriving. If too many bytes are held, refuse the messages held longest."""
        for connection in self._connection_limits.incoming.add(self, size):
            assert isinstance(connection, SlowConnection)
            connection.refuse(Overloaded("too many bytes of incomplete requests are held; try again later"))


class SendProgress:
    """Checks whether a client still reads the bytes that wait to be sent to it."""

    __slots__ = ("_progressed_at", "_size")

    def __init__(self, now: float) -> None:
        self._size = 0
        self._progressed_at = now

    def is_stuck(self, size: int, now: float, patience_s: float) -> bool:
        """Return whether the `size` unsent bytes have not become fewer for `patience_s` seconds."""
        if not size or size < self._size or not self._size:
            self._progressed_at = now
        self._size = size
        return now - self._progressed_at > patience_s


def raise_file_limit() -> int:
    """Raise the limit on open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return UNLIMITED_FILES if hard == resource.RLIM_INFINITY else hard


def compute_max_http_connections(limits: Limits, files: int) -> int:
    return max(1, min(limits.max_connections, _count_files_for_connections(files) * 2 // 3))


def compute_max_grpc_connections(limits: Limits, files: int, files_each: int = 1) -> int:
    return max(1, min(limits.max_connections, _count_files_for_connections(files) // (3 * files_each)))


def _count_files_for_connections(files: int) -> int:
    """Return how many of the `files` that this process may open are for connections: at least half."""
    return files - min(RESERVED_FILES, files // 2)
