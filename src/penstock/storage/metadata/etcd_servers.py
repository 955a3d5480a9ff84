"""The servers of one etcd cluster. A call tries one server after the other until its deadline."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from penstock.core.errors import StoreUnavailable
from penstock.pb.etcd.rpc_pb2_grpc import KVStub, LeaseStub, WatchStub
from penstock.wire.credentials.client_tls import create_client_credentials
from penstock.wire.credentials.tls_files import TlsFiles

T = TypeVar("T")
ATTEMPT_S = 1.0  # per server, so that a server that hangs leaves time for the next
PAUSE_S = 0.05  # after all servers failed; doubles
MAX_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 256 * 1024 * 1024
# With this header, a server without a leader fails at once.
NEEDS_LEADER = (("hasleader", "true"),)
# Failures of the server. Other codes concern the request, and every server would return them.
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
    ("grpc.keepalive_time_ms", 6000),  # etcd allows at most one in 5 s
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class EtcdServer:
    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        """Prepare a connection to the server; without `tls`, the connection is not encrypted."""
        self.address = address
        self.stamps = tls.read_stamps() if tls is not None else None
        if tls is None:
            self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(address, create_client_credentials(tls), options=_OPTIONS)
        self.kv = KVStub(self.channel)
        self.lease = LeaseStub(self.channel)
        self.watch = WatchStub(self.channel)


Attempt = Callable[[EtcdServer, float], Awaitable[T]]  # called with a server and a timeout in seconds


class EtcdServers:
    def __init__(self, addresses: Sequence[str], first: int, tls: TlsFiles | None = None) -> None:
        self._addresses = tuple(addresses)
        self._tls = tls
        self._servers: dict[str, EtcdServer] = {}
        self._current = first % len(addresses)
        self.is_closed = False

    def get_current(self) -> EtcdServer:
        if self.is_closed:
            raise StoreUnavailable("the metadata store is closed")
        address = self._addresses[self._current]
        if address not in self._servers:
            self._servers[address] = EtcdServer(address, self._tls)
        return self._servers[address]

    def switch_from(self, server: EtcdServer) -> None:
        """Switch to the next server, unless another call has already done so."""
        if server.address == self._addresses[self._current]:
            self._current = (self._current + 1) % len(self._addresses)
        if self._tls is not None and server.stamps != self._tls.read_stamps() and server in self._servers.values():
            del self._servers[server.address]  # connect again, because the certificate files were replaced

    async def call(self, attempt: Attempt[T], timeout_s: float, attempt_s: float = ATTEMPT_S) -> T:
        """Return the result of the first successful attempt; raise errors that concern the request.

        An attempt must be safe to repeat, because the server may have applied an attempt that failed.
        """
        now = asyncio.get_running_loop().time
        ends_at = now() + timeout_s
        tried, pause_s, why = 0, PAUSE_S, "no time was left"
        while (left_s := ends_at - now()) > 0:
            server = self.get_current()
            try:
                return await attempt(server, min(attempt_s, left_s))
            except grpc.aio.AioRpcError as error:
                if error.code() not in _SERVERS_FAULTS:
                    raise
                why = f"{server.address}: {error.details()}"
            except asyncio.CancelledError as error:
                self._raise_if_closed(error)
                raise
            self.switch_from(server)
            tried += 1
            if tried % len(self._addresses) == 0:
                await asyncio.sleep(max(0.0, min(pause_s, ends_at - now())))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise StoreUnavailable(f"etcd did not answer in time; last error: {why}")

    async def close(self) -> None:
        self.is_closed = True
        servers, self._servers = self._servers, {}
        for server in servers.values():
            await server.channel.close(grace=None)

    def _raise_if_closed(self, error: BaseException) -> None:
        """Raise StoreUnavailable if a call ended because the channel was closed, not because its task was cancelled."""
        task = asyncio.current_task()
        if self.is_closed and task is not None and not task.cancelling():
            raise StoreUnavailable("the metadata store is closed") from error
