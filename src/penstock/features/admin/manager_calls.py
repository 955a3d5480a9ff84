"""Forwards administration calls to the leading manager, for callers that the guard admitted.

The caller's own key is forwarded, and the manager checks it against the method's permissions, so that a compromised
endpoint gains nothing. A caller without a key (because keys are off, or the caller has a certificate) is forwarded by
name; the manager accepts such names only from its own machine and from other managers.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message
from starlette.requests import HTTPConnection

from penstock.client import faults
from penstock.core.errors import Unavailable
from penstock.endpoints.credentials import Credentials
from penstock.endpoints.http.openapi import get_principal
from penstock.pb.v1 import access_pb2_grpc, cluster_pb2_grpc, manager_pb2_grpc, registry_pb2_grpc
from penstock.wire.leader_connection import LeaderAction, LeaderClient
from penstock.wire.manager_connection import ASKED_BY_HEADER, CALLERS_KEY_HEADER

STUBS = {
    "Cluster": cluster_pb2_grpc.ClusterStub,
    "Rollouts": cluster_pb2_grpc.RolloutsStub,
    "Access": access_pb2_grpc.AccessStub,
    "ModelRegistry": registry_pb2_grpc.ModelRegistryStub,
    "Manager": manager_pb2_grpc.ManagerStub,
}
# Every manager can answer these methods from its own state.
READS = frozenset(
    {
        "Access.GetKey",
        "Access.ListKeys",
        "Cluster.Events",
        "Cluster.ListBlocks",
        "Cluster.ListSessions",
        "Cluster.ListWorkers",
        "Cluster.Status",
        "ModelRegistry.List",
        "Rollouts.ListRollouts",
    }
)
READ_S = 2.0  # time for the leader to answer a read; then this process's manager answers it
ANSWER_S = 15.0
REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class ClusterCalls:
    def __init__(self, leader: LeaderClient, own: LeaderClient | None = None) -> None:
        """Create the calls. `own` is the manager of this process, which answers reads if the leader does not answer."""
        self._leader = leader
        self._own = own

    async def call(self, connection: HTTPConnection, method: str, request: Message, work_s: float = 0.0) -> Any:
        """Call the method SERVICE.NAME of the leader and return the answer; raise the error that the leader answers.

        `takes_s` is the time that the work itself may take, in addition to the time for a call.
        """
        metadata = _make_caller_metadata(connection)

        async def act(channel: grpc.aio.Channel, left_s: float) -> Any:
            try:
                return await _find_method(channel, method)(request, timeout=left_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                _raise_refusal(error)
                raise

        if self._own is None or method not in READS:
            return await self._leader.call(act, ANSWER_S + work_s)
        try:
            return await self._leader.call(act, READ_S)
        except Unavailable:
            return await self._own.call(act, ANSWER_S)

    async def watch(self, connection: HTTPConnection, method: str, request: Message) -> AsyncIterator[Any]:
        """Call a streaming method of the leader, and later of each new leader; yield the answers without end."""
        metadata = _make_caller_metadata(connection)
        answers: asyncio.Queue[Any] = asyncio.Queue(1)  # if it is full, the manager waits

        async def act(channel: grpc.aio.Channel) -> None:
            try:
                async for answer in _find_method(channel, method)(request, metadata=metadata):
                    await answers.put(answer)
            except grpc.aio.AioRpcError as error:
                _raise_refusal(error)
                raise

        watching = asyncio.create_task(self._watch_leaders(act), name="watch-cluster")
        try:
            while True:
                next_answer = asyncio.ensure_future(answers.get())
                try:
                    await asyncio.wait({watching, next_answer}, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done():
                        watching.result()  # raises the error that ended the watch
                    yield await next_answer
                finally:
                    next_answer.cancel()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch_leaders(self, act: LeaderAction[None]) -> None:
        while True:
            await self._leader.run_once(act)


def _find_method(channel: grpc.aio.Channel, method: str) -> Any:
    service, _, name = method.partition(".")
    stub: Any = STUBS[service]
    return getattr(stub(channel), name)


def _make_caller_metadata(connection: HTTPConnection) -> tuple[tuple[str, bytes], ...]:
    keys = Credentials.from_headers(connection.scope["headers"]).keys
    if keys and get_principal(connection).key_id:
        return ((CALLERS_KEY_HEADER, keys[0].encode("latin-1")),)
    return ((ASKED_BY_HEADER, get_principal(connection).name.encode()),)


def _raise_refusal(error: grpc.aio.AioRpcError) -> None:
    if error.code() in REFUSALS:
        raise faults.convert_call_error(error, "the manager") from error
