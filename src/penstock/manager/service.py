"""The manager's gRPC service: workers attach, gateways watch."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict

import grpc
import structlog

from penstock.core.blocks import BlockState
from penstock.core.errors import PenstockError
from penstock.manager.manager import Manager
from penstock.manager.registry import WorkerState
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1 import manager_pb2_grpc
from penstock.pb.v1.job_pb2 import Failure
from penstock.wire.control import MANAGER_SERVER
from penstock.wire.forms import encode_failure

log = structlog.get_logger()


class ManagerService(manager_pb2_grpc.ManagerServicer):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def Attach(  # noqa: N802
        self, reports: AsyncIterator[pb.WorkerReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Assignment]:
        worker = ""
        listening = None
        try:
            first = await anext(aiter(reports))
            worker = first.worker_id
            await self._take(first)
            listening = asyncio.create_task(self._listen(reports))
            seen = -1
            while not listening.done():
                change = asyncio.create_task(self._manager.wait_change(seen))
                await asyncio.wait({change, listening}, return_when=asyncio.FIRST_COMPLETED)
                if not change.done():
                    change.cancel()
                    return
                seen = change.result()
                yield self._assignment()
        finally:
            if listening is not None:
                listening.cancel()
            if worker:
                await self._manager.worker_left(worker)

    async def Watch(  # noqa: N802
        self, requests: AsyncIterator[pb.WatchRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ClusterView]:
        request = await anext(aiter(requests))
        await self._manager.gateway_joined(request.gateway_id, request.endpoint)
        listening = asyncio.create_task(_hear(requests))
        try:
            seen = -1
            while True:
                seen = await self._manager.wait_change(seen)
                blocks = [pb.BlockView(**asdict(block)) for block in self._manager.view()]
                yield pb.ClusterView(blocks=blocks, revision=seen, is_snapshot=True)
        finally:
            listening.cancel()
            await self._manager.gateway_left(request.gateway_id)

    async def Load(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext) -> pb.LoadResponse:  # noqa: N802
        return pb.LoadResponse(failure=await _failure_of(self._manager.load(request.model)))

    async def Unload(self, request: pb.UnloadRequest, context: grpc.aio.ServicerContext) -> pb.UnloadResponse:  # noqa: N802
        return pb.UnloadResponse(failure=await _failure_of(self._manager.unload(request.model)))

    async def SetRouting(  # noqa: N802
        self, request: pb.SetRoutingRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetRoutingResponse:
        failure = await _failure_of(self._manager.set_routing(request.model, request.routing))
        return pb.SetRoutingResponse(failure=failure)

    async def _listen(self, reports: AsyncIterator[pb.WorkerReport]) -> None:
        async for report in reports:
            await self._take(report)

    async def _take(self, report: pb.WorkerReport) -> None:
        await self._manager.worker_reported(
            report.worker_id,
            [(b.block_id, WorkerState(BlockState(b.state), b.reason, b.revision, b.is_serving)) for b in report.blocks],
        )

    def _assignment(self) -> pb.Assignment:
        gateways, blocks = self._manager.assigned()
        return pb.Assignment(
            gateways=gateways,
            has_gateways=True,
            is_snapshot=True,
            blocks=[
                pb.BlockAssignment(
                    block_id=block.block_id,
                    model=block.model,
                    version=block.version,
                    folder=block.folder,
                    revision=block.revision,
                    replaces=block.replaces,
                    is_new=block.is_new,
                )
                for block in blocks
            ],
        )


async def _hear(requests: AsyncIterator[pb.WatchRequest]) -> None:
    async for _ in requests:
        pass


async def _failure_of(call: Awaitable[None]) -> Failure | None:
    try:
        await call
    except PenstockError as error:
        log.warning("not_done", code=error.code, error=error.message)  # in full: the client hears less
        return encode_failure(error)
    return None


async def serve_manager(manager: Manager, *addresses: str) -> grpc.aio.Server:
    server = grpc.aio.server(options=MANAGER_SERVER)
    manager_pb2_grpc.add_ManagerServicer_to_server(ManagerService(manager), server)
    for address in addresses:
        server.add_insecure_port(address)
    await server.start()
    return server
