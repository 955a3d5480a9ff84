"""Who may connect: how many at once, in all and from one address, and how many this process has files for."""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable

from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.serving.admission import Admission

# Files that are never connections: workers' sockets, models, metrics, what libraries open.
RESERVED_FILES = 1024
MANY_FILES = 1024 * 1024  # where the system has no bound


class Turnstile:
    """HTTP's and WebSockets' connections; what they hold for their clients counts in admission."""

    def __init__(
        self, limits: Limits, admission: Admission, turned_away: Callable[[PenstockError], None], most: int
    ) -> None:
        self.limits = limits
        self._admission = admission
        self.coming = admission.coming
        self.unsent = admission.unsent
        self.turned_away = turned_away
        self._most = most
        self._most_of_one = max(1, int(limits.client_share * most))
        self._inside: Counter[str] = Counter()
        self._count = 0

    def again(self) -> "Turnstile":
        """Another that counts by itself, for what is in front of this one."""
        return Turnstile(self.limits, self._admission, self.turned_away, self._most)

    def let_in(self, address: str) -> bool:
        """Where it does, `left` must follow."""
        if self._count >= self._most or self._inside[address] >= self._most_of_one:
            return False
        self._count += 1
        self._inside[address] += 1
        return True

    def left(self, address: str) -> None:
        self._count -= 1
        self._inside[address] -= 1
        if not self._inside[address]:
            del self._inside[address]


class SlowConnection(asyncio.Protocol):
    """What its client has not taken counts until it has; where others need the room, it goes."""

    transport: asyncio.Transport
    _turnstile: Turnstile

    def pause_writing(self) -> None:
        super().pause_writing()
        self._turnstile.unsent.hold(self, unsent_bytes(self.transport))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._turnstile.unsent.drop(self)

    def give_up(self) -> None:
        self.transport.abort()


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What its client has not taken; of a TLS connection that has ended, nothing can be asked."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0


class Outlet:
    """Whether the bytes that wait to be sent move."""

    __slots__ = ("_moved", "_size")

    def __init__(self, now: float) -> None:
        self._size = 0
        self._moved = now

    def is_stuck(self, size: int, now: float, patience_s: float) -> bool:
        if not size or size < self._size or not self._size:
            self._moved = now
        self._size = size
        return now - self._moved > patience_s


def widen_files() -> int:
    """Lets this process open as many files as it may. Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return MANY_FILES if hard == resource.RLIM_INFINITY else hard


def http_connections(limits: Limits, files: int) -> int:
    return max(1, min(limits.max_connections, _spare(files) * 2 // 3))


def grpc_connections(limits: Limits, files: int, files_each: int = 1) -> int:
    return max(1, min(limits.max_connections, _spare(files) // (3 * files_each)))


def _spare(files: int) -> int:
    """Where there are few, half of them."""
    return files - min(RESERVED_FILES, files // 2)
