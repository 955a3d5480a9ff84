"""The servers of one etcd: a call goes to one of them, and to the next where that one fails, until its time is over."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from penstock.core.errors import StoreUnavailable
from penstock.pb.etcd.rpc_pb2_grpc import KVStub, LeaseStub, WatchStub
from penstock.wire.credentials.channels import client_credentials
from penstock.wire.credentials.files import TlsFiles

T = TypeVar("T")
ATTEMPT_S = 1.0  # what one server has: one that hangs or was cut off must leave time for the next
PAUSE_S = 0.05  # after all of them failed; doubles
MAX_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 256 * 1024 * 1024
# A server that knows no leader says so at once.
NEEDS_LEADER = (("hasleader", "true"),)
# Others than these are about the request, and would be answered alike by every server.
_SERVERS_FAULTS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
)
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 6000),  # etcd takes no more than one in 5 s
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class EtcdServer:
    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        """Without files it is plain."""
        self.address = address
        self.stamps = tls.stamps() if tls is not None else None
        if tls is None:
            self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(address, client_credentials(tls), options=_OPTIONS)
        self.kv = KVStub(self.channel)
        self.lease = LeaseStub(self.channel)
        self.watch = WatchStub(self.channel)


Attempt = Callable[[EtcdServer, float], Awaitable[T]]  # at this server, within these seconds


class EtcdServers:
    def __init__(self, addresses: Sequence[str], first: int, tls: TlsFiles | None = None) -> None:
        self._addresses = tuple(addresses)
        self._tls = tls
        self._servers: dict[str, EtcdServer] = {}
        self._current = first % len(addresses)
        self.is_closed = False

    def current(self) -> EtcdServer:
        if self.is_closed:
            raise StoreUnavailable("the metadata store is closed")
        address = self._addresses[self._current]
        if address not in self._servers:
            self._servers[address] = EtcdServer(address, self._tls)
        return self._servers[address]

    def failed(self, server: EtcdServer) -> None:
        """The next one is tried, unless somebody else has gone on already."""
        if server.address == self._addresses[self._current]:
            self._current = (self._current + 1) % len(self._addresses)
        if self._tls is not None and server.stamps != self._tls.stamps() and server in self._servers.values():
            del self._servers[server.address]  # it goes by certificates that others have replaced

    async def call(self, attempt: Attempt[T], timeout_s: float, attempt_s: float = ATTEMPT_S) -> T:
        """An attempt that failed may have been heard: it must do no harm twice. Raises what is the request's fault."""
        now = asyncio.get_running_loop().time
        ends_at = now() + timeout_s
        tried, pause_s, why = 0, PAUSE_S, "no time was left"
        while (left_s := ends_at - now()) > 0:
            server = self.current()
            try:
                return await attempt(server, min(attempt_s, left_s))
            except grpc.aio.AioRpcError as error:
                if error.code() not in _SERVERS_FAULTS:
                    raise
                why = f"{server.address}: {error.details()}"
            except asyncio.CancelledError as error:
                self._raise_if_closed(error)
                raise
            self.failed(server)
            tried += 1
            if tried % len(self._addresses) == 0:
                await asyncio.sleep(max(0.0, min(pause_s, ends_at - now())))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise StoreUnavailable(f"etcd did not answer in time; last at {why}")

    async def close(self) -> None:
        self.is_closed = True
        servers, self._servers = self._servers, {}
        for server in servers.values():
            await server.channel.close(grace=None)

    def _raise_if_closed(self, error: BaseException) -> None:
        """Closing a channel cancels its calls; that is not their callers being cancelled."""
        task = asyncio.current_task()
        if self.is_closed and task is not None and not task.cancelling():
            raise StoreUnavailable("the metadata store is closed") from error
