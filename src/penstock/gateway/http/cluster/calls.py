"""What a door passes on to the manager that leads, for whom it has admitted.

The caller's own key goes along and is held against what the method needs by the manager itself: a door that is taken
over gains nothing by it. Of a caller without one (where doors ask nothing, or known by its certificate) the name goes
along, and the manager believes its own machine and other managers alone.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message
from starlette.requests import HTTPConnection

from penstock.access.showing import Shown
from penstock.client import faults
from penstock.gateway.http.openapi import principal_of
from penstock.pb.v1 import access_pb2_grpc, cluster_pb2_grpc, manager_pb2_grpc, registry_pb2_grpc
from penstock.wire.control import ASKED_BY, CALLERS_KEY
from penstock.wire.leader import Leader

STUBS = {
    "Cluster": cluster_pb2_grpc.ClusterStub,
    "Rollouts": cluster_pb2_grpc.RolloutsStub,
    "Access": access_pb2_grpc.AccessStub,
    "ModelRegistry": registry_pb2_grpc.ModelRegistryStub,
    "Manager": manager_pb2_grpc.ManagerStub,
}
ANSWER_S = 15.0
REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class ClusterCalls:
    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    async def ask(self, connection: HTTPConnection, method: str, request: Message, takes_s: float = 0.0) -> Any:
        """Raises the failure that was answered. `method`: SERVICE.NAME; `takes_s`: what the answer itself may take."""
        metadata = _of(connection)

        async def act(channel: grpc.aio.Channel, left_s: float) -> Any:
            try:
                return await _method(channel, method)(request, timeout=left_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                _refuse(error)
                raise

        return await self._leader.call(act, ANSWER_S + takes_s)

    async def watch(self, connection: HTTPConnection, method: str, request: Message) -> AsyncIterator[Any]:
        """Its answers, and again those of the next that leads; ends never by itself."""
        metadata = _of(connection)
        answers: asyncio.Queue[Any] = asyncio.Queue(1)  # full: the manager waits

        async def act(channel: grpc.aio.Channel) -> None:
            try:
                async for answer in _method(channel, method)(request, metadata=metadata):
                    await answers.put(answer)
            except grpc.aio.AioRpcError as error:
                _refuse(error)
                raise

        going = asyncio.create_task(self._leader.attend(act), name="watch-cluster")
        try:
            while True:
                taking = asyncio.ensure_future(answers.get())
                try:
                    await asyncio.wait({going, taking}, return_when=asyncio.FIRST_COMPLETED)
                    if going.done():
                        going.result()  # raises why it is over
                    yield await taking
                finally:
                    taking.cancel()
        finally:
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)


def _method(channel: grpc.aio.Channel, method: str) -> Any:
    service, _, name = method.partition(".")
    stub: Any = STUBS[service]
    return getattr(stub(channel), name)


def _of(connection: HTTPConnection) -> tuple[tuple[str, bytes], ...]:
    keys = Shown.of_headers(connection.scope["headers"]).keys
    if keys and principal_of(connection).key_id:
        return ((CALLERS_KEY, keys[0].encode("latin-1")),)
    return ((ASKED_BY, principal_of(connection).name.encode()),)


def _refuse(error: grpc.aio.AioRpcError) -> None:
    if error.code() in REFUSALS:
        raise faults.from_call(error, "the manager") from error
