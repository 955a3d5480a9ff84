"""Bytes that this process holds for clients: of large messages, of slow requests, and of answers that are not read."""

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from penstock.core.config import Limits
from penstock.core.errors import Overloaded

T = TypeVar("T")

# At most this much of a message arrives before its size is known to be too large.
LAST_PART_BYTES = 1024 * 1024
COPIES = 2  # a large message counts this many times, because it is copied while it is decoded and answered
WAIT_S = 15.0  # for room, at most
ARRIVE_S = 5.0  # a message that takes longer to arrive may be refused for the benefit of messages that wait for room
MOST_WAITING = 256  # messages


class Room:
    """Bounds the bytes of large messages, from before they are read until their answers are read.

    A message that does not fit waits for its turn, unless nothing else is held. While messages wait, those that arrive
    slowly are refused, so that slow clients do not block others.
    """

    def __init__(self, max_bytes: int, arrive_s: float = ARRIVE_S, wait_s: float = WAIT_S) -> None:
        self.max_bytes = max_bytes
        self._arrive_s = arrive_s
        self._wait_s = wait_s
        self.bytes = 0
        self.freed_bytes = 0  # in total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._read_bytes = 0  # of messages that were read before they got room, and wait
        self._arriving: dict[Claim, None] = {}  # in the order in which they began
        self._next_look: asyncio.TimerHandle | None = None

    async def take(self, size: int, wait_s: float = WAIT_S, read_bytes: int = 0) -> None:
        """Wait until there is room for `size` bytes, and count them. Raise Overloaded if that takes too long.

        `read_bytes` are already in memory.
        """
        if not self._waiting and self._fits(size):
            self.bytes += size
            return
        if len(self._waiting) >= MOST_WAITING or self._read_bytes + read_bytes > self.max_bytes // 2:
            self.freed_bytes += read_bytes
            raise self._full()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = size, granted
        self._waiting.append(waiting)
        self._read_bytes += read_bytes
        self._look_later()
        try:
            async with asyncio.timeout(min(wait_s, self._wait_s)):
                await granted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._grant()
            else:
                self.give(size)
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise
        finally:
            self._read_bytes -= read_bytes

    def count(self, size: int) -> None:
        """Count bytes that are held already."""
        self.bytes += size

    def give(self, size: int) -> None:
        """Stop counting bytes, and let those messages continue that now have room."""
        self.bytes -= size
        self.freed_bytes += size
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, granted = self._waiting.popleft()
            self.bytes += size
            if not granted.done():  # otherwise its caller has left, and gives the room back
                granted.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self.bytes or self.bytes + size <= self.max_bytes

    def _full(self) -> Overloaded:
        return Overloaded(f"{self.bytes} bytes of large messages are held (limits.max_inflight_bytes); try again later")

    # --- messages that arrive

    async def arrive(self, claim: "Claim", part: Awaitable[T]) -> T:
        """Return a part of a message. Raise Overloaded if the message arrives slowly while others wait for room."""
        self._arriving.setdefault(claim)
        try:
            async with asyncio.timeout(None) as claim.limit:
                return await part
        except TimeoutError:
            raise Overloaded(
                "the message arrived too slowly while other large messages waited; try again later"
            ) from None
        finally:
            claim.limit = None

    def note_arrival(self, claim: "Claim") -> None:
        self._arriving.pop(claim, None)

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(self._arrive_s / 2, self._refuse_slowest)

    def _refuse_slowest(self) -> None:
        """End the arrival that began first if it is slow, and look again while messages wait."""
        self._next_look = None
        now = asyncio.get_running_loop().time()
        if not self._waiting:
            return
        self._look_later()
        slowest = next(iter(self._arriving), None)
        if slowest is not None and now - slowest.since > self._arrive_s and slowest.limit is not None:
            del self._arriving[slowest]
            slowest.limit.reschedule(now)


class Claim:
    """The room of one message and its answer."""

    __slots__ = ("_room", "bytes", "limit", "since")

    def __init__(self, room: Room) -> None:
        self._room = room
        self.bytes = 0
        self.limit: asyncio.Timeout | None = None  # of the part that is awaited, if one is
        self.since = 0.0

    async def take(self, size: int, wait_s: float = WAIT_S, read_bytes: int = 0) -> None:
        """Wait for room for a message of `size` bytes. Raise Overloaded if there is none."""
        await self._room.take(COPIES * size, wait_s, read_bytes)
        self.bytes += COPIES * size
        self.since = asyncio.get_running_loop().time()

    async def arrive(self, part: Awaitable[T]) -> T:
        return await self._room.arrive(self, part)

    def note_arrival(self, size: int) -> None:
        """Correct the room of a message whose size was not known before."""
        self._room.note_arrival(self)
        if self.bytes:
            more, self.bytes = COPIES * size - self.bytes, COPIES * size
            if more > 0:
                self._room.count(more)
            else:
                self._room.give(-more)

    def release(self) -> None:
        self._room.note_arrival(self)
        if self.bytes:
            self._room.give(self.bytes)
            self.bytes = 0


class SlowClient(Protocol):
    def disconnect_client(self) -> None:
        """Drop the bytes that are held for this client, and disconnect the client."""


class HeldBytes:
    """Counts the bytes that this process holds for slow clients.

    Above `max_bytes`, clients are disconnected, in the order in which they began to hold bytes, so that stalled clients
    do not block others.
    """

    def __init__(self, max_bytes: int, room: Room | None = None) -> None:
        """Start with nothing. `room`: the bytes also count there."""
        self.max_bytes = max_bytes
        self._room = room
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
        if self._room is not None:
            self._room.count(size)
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
            self._subtract(size)
        else:
            self.drop(holder)

    def drop(self, holder: SlowClient) -> None:
        if size := self._held.pop(holder, 0):
            self._subtract(size)

    def _subtract(self, size: int) -> None:
        self.bytes -= size
        if self._room is not None:
            self._room.give(size)


class Transit:
    """Counts the bytes of large messages, of incomplete requests, and of answers that clients have not read."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        held_bytes = max(limits.max_inflight_bytes, limits.max_message_bytes + LAST_PART_BYTES)
        self.incoming = HeldBytes(held_bytes)
        self.room = Room(limits.max_inflight_bytes, wait_s=min(WAIT_S, limits.message_timeout_s))
        # Half of the room, so that clients that do not read their answers leave room for a message of the largest size.
        self.unsent = HeldBytes(max(held_bytes // 2, limits.max_message_bytes + LAST_PART_BYTES), self.room)
