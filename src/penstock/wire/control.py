"""A gateway's connection to a manager in another process."""

import asyncio
from collections.abc import Awaitable

import grpc
import structlog

from penstock.core.blocks import BlockState, BlockView, Listener
from penstock.core.errors import Unavailable, UnknownModel
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1 import manager_pb2_grpc
from penstock.wire.forms import decode_failure

log = structlog.get_logger()
RETRY_S = 0.5
UNLOAD_TIMEOUT_S = 60.0
ROUTING_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 86_400.0
# It is on this machine: one that was not there just now may be there at once.
MANAGER_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))
NAME_CHARS = 128


class RemoteControl:
    """Implements core.blocks.Control, and watches the cluster for as long as it is open."""

    def __init__(self, address: str, gateway_id: str, endpoint: str, listener: Listener) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=MANAGER_CHANNEL)
        self._stub = manager_pb2_grpc.ManagerStub(self._channel)
        self._request = pb.WatchRequest(gateway_id=gateway_id, endpoint=endpoint)
        self._listener = listener
        self._watching = asyncio.create_task(self._watch_forever(), name="watch-manager")

    async def load(self, model: str) -> None:
        _check(model)
        await self._call(self._stub.Load(pb.LoadRequest(model=model), timeout=LOAD_TIMEOUT_S))

    async def unload(self, model: str) -> None:
        _check(model)
        await self._call(self._stub.Unload(pb.UnloadRequest(model=model), timeout=UNLOAD_TIMEOUT_S))

    async def set_routing(self, model: str, routing_json: str) -> None:
        request = pb.SetRoutingRequest(model=model, routing=routing_json)
        await self._call(self._stub.SetRouting(request, timeout=ROUTING_TIMEOUT_S))

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close(grace=None)

    async def _call(self, call: Awaitable[pb.LoadResponse | pb.UnloadResponse | pb.SetRoutingResponse]) -> None:
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise Unavailable("the manager does not answer; try again") from error
        if response.HasField("failure"):
            raise decode_failure(response.failure)

    async def _watch_forever(self) -> None:
        """While the manager is away, the last view stands."""
        while True:
            try:
                async for view in self._stub.Watch(self._request, wait_for_ready=True):
                    self._listener(
                        [
                            BlockView(
                                b.block_id,
                                b.model,
                                b.version,
                                BlockState(b.state),
                                b.reason,
                                b.routing,
                                b.has_served,
                                b.is_new,
                            )
                            for b in view.blocks
                        ]
                    )
            except grpc.aio.AioRpcError as error:
                log.warning("manager_away", error=error.details())
            await asyncio.sleep(RETRY_S)


def _check(model: str) -> None:
    """No model has a name that long, and the manager need not hear of it."""
    if len(model) > NAME_CHARS:
        raise UnknownModel(f"unknown model '{model[:NAME_CHARS]}…': no name has more than {NAME_CHARS} characters")
