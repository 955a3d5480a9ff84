"""The manager that leads a cluster, as workers and gateways reach it: found, followed when it changes, called."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
import structlog

from penstock.core.errors import NotLeader, PenstockError, StoreUnavailable, Unavailable
from penstock.wire.channels import PLAIN, Channels
from penstock.wire.failures import decode_failure

log = structlog.get_logger()
R = TypeVar("R")
LEADERLESS_S = 10.0  # what a call waits for somebody to lead
RETRY_S = 0.1  # doubles
MAX_RETRY_S = 0.5
CLOSE_S = 1.0
LOOK_S = 0.3  # a call that lasts so long has somebody look whether its leader still leads, and again, ever more rarely
MAX_LOOK_S = 2.0


class LeaderAt(NamedTuple):
    address: str
    epoch: int  # 0: nobody said
    history: str = ""  # that the epoch is of; empty: nobody said


async def said_aloud(requests: AsyncIterator[R]) -> AsyncIterator[R]:
    """The same, and what goes wrong in making them: gRPC cancels such a call, and says nothing."""
    try:
        async for request in requests:
            yield request
    except Exception:
        log.exception("bug", where="requests")
        raise


class LeaderSource(Protocol):
    def follow(self) -> AsyncIterator[LeaderAt]:
        """Whoever leads, and again whenever that is another; never ends by itself."""
        ...

    def hurry(self) -> None:
        """Whoever was told last does not answer as a leader: look again soon."""
        ...

    async def close(self) -> None: ...


class SoleManager:
    """The only one that there is, at an address that never changes."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def follow(self) -> AsyncIterator[LeaderAt]:
        yield LeaderAt(self._address, 0)
        await asyncio.Event().wait()

    def hurry(self) -> None:
        """There is no other."""

    async def close(self) -> None:
        """There is nothing open."""


class LeaderConnection:
    def __init__(self, at: LeaderAt, channels: Channels) -> None:
        self.at = at
        self.stamps = channels.stamps()
        self.channel = channels.open(at.address)
        self.is_over = asyncio.Event()  # another leads


Act = Callable[[grpc.aio.Channel], Coroutine[Any, Any, R]]


class Leader:
    """Used from one event loop."""

    def __init__(self, source: LeaderSource, channels: Channels = PLAIN) -> None:
        self._source = source
        self.channels = channels
        self._connection: LeaderConnection | None = None
        self._is_known = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._following = asyncio.create_task(self._follow(), name="follow-leader")

    @property
    def address(self) -> str:
        """Empty: nobody is known to lead."""
        return self._connection.at.address if self._connection is not None else ""

    async def during(self, act: Act[R]) -> R:
        """Does it with whoever leads, for as long as nobody else does: then NotLeader is raised."""
        await self._is_known.wait()
        connection = self._connection
        assert connection is not None
        acting = asyncio.ensure_future(act(connection.channel))
        over = asyncio.ensure_future(connection.is_over.wait())
        try:
            await asyncio.wait({acting, over}, return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                return acting.result()
            raise NotLeader(f"the manager at {connection.at.address} leads no more", reason="moved")
        finally:
            over.cancel()
            acting.cancel()
            await asyncio.gather(acting, over, return_exceptions=True)

    async def attend(self, act: Act[None]) -> NoReturn:
        """Does it with whoever leads, and with the next, and again when it ends or fails. What is meant for the caller
        is raised, any other error is told: who hears of its manager no more is of no use to anybody."""
        said = ""
        while True:
            try:
                await self.during(act)
            except NotLeader:
                continue
            except grpc.aio.AioRpcError as error:
                if error.details() != said:
                    said = error.details() or ""
                    log.warning("manager_away", address=self.address, error=said)
                self._renew()
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                log.error("bug", where="attend", error="a call was cancelled by itself: see what its requests came to")
            except PenstockError:
                raise
            except Exception:
                log.exception("bug", where="attend")
            else:
                said = ""
            self._source.hurry()
            await asyncio.sleep(random.uniform(RETRY_S, MAX_RETRY_S))

    async def call(self, act: Callable[[grpc.aio.Channel, float], Awaitable[R]], timeout_s: float) -> R:
        """A call that may be repeated: where its leader goes it is made anew at the next. Its answer has a `failure`.

        Raises that failure, or Unavailable.
        """
        now = asyncio.get_running_loop().time
        ends_at = now() + timeout_s
        gives_up_at = min(ends_at, now() + LEADERLESS_S)
        pause_s = RETRY_S
        while True:
            answer, error = await self._attempt(act, ends_at - now(), gives_up_at - now())
            if answer is not None:
                return answer
            assert error is not None
            self._source.hurry()
            if now() + pause_s >= gives_up_at:
                raise error
            if isinstance(error, NotLeader) and error.reason == "moved":
                gives_up_at = min(ends_at, now() + LEADERLESS_S)  # it was under way, and begins anew
            else:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _attempt(
        self, act: Callable[[grpc.aio.Channel, float], Awaitable[R]], left_s: float, patience_s: float
    ) -> tuple[R | None, Unavailable | None]:
        async def called(channel: grpc.aio.Channel) -> R:
            looking = asyncio.create_task(self._look())
            try:
                return await act(channel, left_s)
            finally:
                looking.cancel()

        try:
            async with asyncio.timeout(patience_s):
                await self._is_known.wait()
        except TimeoutError:
            return None, Unavailable("no manager of the cluster answers; try again")
        try:
            answer: Any = await self.during(called)
        except NotLeader as error:
            return None, error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise StoreUnavailable("the manager did not answer in time; look whether it was done") from error
            self._renew()
            return None, Unavailable("the manager does not answer; try again")
        if not answer.HasField("failure"):
            return answer, None
        failure = decode_failure(answer.failure)
        if not isinstance(failure, NotLeader):
            raise failure
        return None, failure

    async def _look(self) -> NoReturn:
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            self._source.hurry()
            pause_s = min(1.1 * pause_s, MAX_LOOK_S)

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self._replace(None)
        await self._source.close()
        await asyncio.gather(*self._closing)

    async def _follow(self) -> None:
        async for at in self._source.follow():
            if self._connection is None or at != self._connection.at:
                log.info("leader", address=at.address, epoch=at.epoch)
                self._replace(LeaderConnection(at, self.channels))

    def _renew(self) -> None:
        """A channel shows the certificate that it was opened with, whatever has come since: here it has failed."""
        connection = self._connection
        if connection is not None and connection.stamps != self.channels.stamps():
            self._replace(LeaderConnection(connection.at, self.channels))

    def _replace(self, connection: LeaderConnection | None) -> None:
        old, self._connection = self._connection, connection
        if connection is None:
            self._is_known.clear()
        else:
            self._is_known.set()
        if old is not None:
            old.is_over.set()
            task = asyncio.create_task(_close(old))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _close(connection: LeaderConnection) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(2 * CLOSE_S):
            await connection.channel.close(grace=CLOSE_S)
