"""The Open Inference Protocol's shared memory methods over gRPC."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio

from penstock.access.guard import needs_scope
from penstock.core.principals import INFERRING, Principal
from penstock.gateway.shared_memory.regions import SharedMemory, no_cuda
from penstock.pb.inference import grpc_service_pb2 as pb


class SharedMemoryGrpc:
    """Beside OipGrpc on one server: each answers for the methods that it has."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    @needs_scope(*INFERRING)
    async def SystemSharedMemoryStatus(
        self, message: pb.SystemSharedMemoryStatusRequest, principal: Principal
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in await asyncio.to_thread(self._memory.of(principal.key_id).status, message.name):
            status = answer.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return answer

    @needs_scope(*INFERRING)
    async def SystemSharedMemoryRegister(
        self, message: pb.SystemSharedMemoryRegisterRequest, principal: Principal
    ) -> pb.SystemSharedMemoryRegisterResponse:
        register = self._memory.of(principal.key_id).register
        await asyncio.to_thread(register, message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    @needs_scope(*INFERRING)
    async def SystemSharedMemoryUnregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest, principal: Principal
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await asyncio.to_thread(self._memory.of(principal.key_id).unregister, message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @needs_scope(*INFERRING)
    async def CudaSharedMemoryStatus(
        self, message: pb.CudaSharedMemoryStatusRequest, principal: Principal
    ) -> pb.CudaSharedMemoryStatusResponse:
        if message.name:
            raise no_cuda(message.name)
        return pb.CudaSharedMemoryStatusResponse()

    @needs_scope(*INFERRING)
    async def CudaSharedMemoryRegister(
        self, message: pb.CudaSharedMemoryRegisterRequest, principal: Principal
    ) -> pb.CudaSharedMemoryRegisterResponse:
        raise no_cuda(message.name)

    @needs_scope(*INFERRING)
    async def CudaSharedMemoryUnregister(
        self, message: pb.CudaSharedMemoryUnregisterRequest, principal: Principal
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Clients unregister all before they begin, whether there are any or not."""
        return pb.CudaSharedMemoryUnregisterResponse()
