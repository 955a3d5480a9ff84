"""The connection of workers and gateways to the leading manager; follows changes of the leader and retries calls."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
import structlog

from penstock.core.errors import NotLeader, StoreUnavailable, Unavailable
from penstock.telemetry.background import BackgroundTasks
from penstock.wire.channels import PLAIN_CHANNELS, Channels
from penstock.wire.failures import decode_failure

log = structlog.get_logger()
R = TypeVar("R")
LEADER_TIMEOUT_S = 10.0  # how long a call waits for a leader
RETRY_S = 0.1  # doubles
MAX_RETRY_S = 0.5
CLOSE_S = 1.0
CHECK_S = 0.3  # if a call takes longer, the leader is checked, and checked again with growing pauses
MAX_CHECK_S = 2.0


class LeaderAddress(NamedTuple):
    address: str
    epoch: int  # 0: not known
    history: str = ""  # of the metadata store in which the epoch was counted; empty: not known


async def log_request_errors(requests: AsyncIterator[R]) -> AsyncIterator[R]:
    """Yield the requests; log an error of the `requests` iterator, because gRPC does not report such errors."""
    try:
        async for request in requests:
            yield request
    except Exception:
        log.exception("bug", where="requests")
        raise


class LeaderSource(Protocol):
    """Finds the leading manager of a cluster."""

    def follow(self) -> AsyncIterator[LeaderAddress]:
        """Yield the current leader, then each new leader. Never ends by itself."""
        ...

    def search_now(self) -> None:
        """Search for the leader again soon, because the last known leader does not answer or no longer leads."""
        ...

    async def close(self) -> None: ...


class FixedLeader:
    """A LeaderSource for a cluster whose only manager has a fixed address."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def follow(self) -> AsyncIterator[LeaderAddress]:
        yield LeaderAddress(self._address, 0)
        await asyncio.Event().wait()

    def search_now(self) -> None:
        """Do nothing: the leader never changes."""

    async def close(self) -> None:
        """Do nothing: a FixedLeader has nothing to close."""


class LeaderConnection:
    """A gRPC channel to one leading manager."""

    def __init__(self, leader: LeaderAddress, channels: Channels) -> None:
        self.leader = leader
        self.stamps = channels.read_stamps()
        self.channel = channels.open(leader.address)
        self.is_over = asyncio.Event()  # set when there is another leader


LeaderAction = Callable[[grpc.aio.Channel], Coroutine[Any, Any, R]]


class LeaderClient:
    """Calls the current leader, and follows changes of the leader. Used from one event loop."""

    def __init__(self, source: LeaderSource, channels: Channels = PLAIN_CHANNELS) -> None:
        self._source = source
        self.channels = channels
        self._connection: LeaderConnection | None = None
        self._is_known = asyncio.Event()
        self._problem = ""  # the last error of a call to the leader
        self._closing = BackgroundTasks("leader")
        self._tasks = BackgroundTasks("leader")
        self._tasks.supervise("leader", self._follow, deadline_s=None)

    @property
    def address(self) -> str:
        """The current leader's address; empty while no leader is known."""
        return self._connection.leader.address if self._connection is not None else ""

    async def run_with_leader(self, action: LeaderAction[R]) -> R:
        """Run `action` with a channel to the leader. Raises NotLeader if the leader changes before `action` ends."""
        await self._is_known.wait()
        connection = self._connection
        assert connection is not None
        acting = asyncio.ensure_future(action(connection.channel))
        over = asyncio.ensure_future(connection.is_over.wait())
        try:
            await asyncio.wait({acting, over}, return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                return acting.result()
            raise NotLeader(f"the manager at {connection.leader.address} is no longer the leader", reason="moved")
        finally:
            over.cancel()
            acting.cancel()
            await asyncio.gather(acting, over, return_exceptions=True)

    async def run_once(self, action: LeaderAction[None]) -> None:
        """Run `action` once with the current leader. Then pause, unless the leader has changed.

        A supervised loop calls this repeatedly. Errors other than a lost connection are raised.
        """
        try:
            await self.run_with_leader(action)
        except NotLeader:
            return
        except grpc.aio.AioRpcError as error:
            if error.details() != self._problem:
                self._problem = error.details() or ""
                log.warning("manager_connection_lost", address=self.address, error=self._problem)
            self._reopen_with_new_tls()
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            log.error("bug", where="run_once", error="gRPC cancelled a call; its requests failed, see the log above")
        except Exception:
            self._source.search_now()
            raise
        else:
            self._problem = ""
        self._source.search_now()
        await asyncio.sleep(random.uniform(RETRY_S, MAX_RETRY_S))

    async def call(self, action: Callable[[grpc.aio.Channel, float], Awaitable[R]], timeout_s: float) -> R:
        """Make a call to the leader; if the leader changes, repeat the call at the new leader.

        If the field `failure` of the answer is set, raise it as an error. Raise Unavailable if no leader answers.
        """
        now = asyncio.get_running_loop().time
        ends_at = now() + timeout_s
        gives_up_at = min(ends_at, now() + LEADER_TIMEOUT_S)
        pause_s = RETRY_S
        while True:
            answer, error = await self._try_call(action, ends_at - now(), gives_up_at - now())
            if answer is not None:
                return answer
            assert error is not None
            self._source.search_now()
            if now() + pause_s >= gives_up_at:
                raise error
            if isinstance(error, NotLeader) and error.reason == "moved":
                # The call had started, so the time to wait for a leader starts again.
                gives_up_at = min(ends_at, now() + LEADER_TIMEOUT_S)
            else:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _try_call(
        self, action: Callable[[grpc.aio.Channel, float], Awaitable[R]], left_s: float, max_wait_s: float
    ) -> tuple[R | None, Unavailable | None]:
        async def call_while_leading(channel: grpc.aio.Channel) -> R:
            checking = asyncio.create_task(self._check_leader())
            try:
                return await action(channel, left_s)
            finally:
                checking.cancel()

        try:
            async with asyncio.timeout(max_wait_s):
                await self._is_known.wait()
        except TimeoutError:
            return None, Unavailable("no manager of the cluster answers; try again")
        try:
            answer: Any = await self.run_with_leader(call_while_leading)
        except NotLeader as error:
            return None, error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise StoreUnavailable(
                    "the manager did not answer in time; check if the change was made before you try again"
                ) from error
            self._reopen_with_new_tls()
            return None, Unavailable("the manager does not answer; try again")
        if not answer.HasField("failure"):
            return answer, None
        failure = decode_failure(answer.failure)
        if not isinstance(failure, NotLeader):
            raise failure
        return None, failure

    async def _check_leader(self) -> NoReturn:
        pause_s = CHECK_S
        while True:
            await asyncio.sleep(pause_s)
            self._source.search_now()
            pause_s = min(1.1 * pause_s, MAX_CHECK_S)

    async def close(self) -> None:
        await self._tasks.close()
        self._replace(None)
        await self._source.close()
        await self._closing.wait()

    async def _follow(self) -> None:
        async for at in self._source.follow():
            if self._connection is None or at != self._connection.leader:
                # The connection to a manager on the same machine is logged only at debug level.
                report = log.debug if at.address.startswith("unix:") else log.info
                report("leader_connected", address=at.address)
                self._replace(LeaderConnection(at, self.channels))

    def _reopen_with_new_tls(self) -> None:
        """Reopen the failed channel if the TLS files have changed, because a channel reads the files only once."""
        connection = self._connection
        if connection is not None and connection.stamps != self.channels.read_stamps():
            self._replace(LeaderConnection(connection.leader, self.channels))

    def _replace(self, connection: LeaderConnection | None) -> None:
        old, self._connection = self._connection, connection
        if connection is None:
            self._is_known.clear()
        else:
            self._is_known.set()
        if old is not None:
            old.is_over.set()
            self._closing.spawn(_close(old))


async def _close(connection: LeaderConnection) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(2 * CLOSE_S):
            await connection.channel.close(grace=CLOSE_S)
