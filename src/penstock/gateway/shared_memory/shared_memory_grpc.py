"""The Open Inference Protocol's shared memory methods over gRPC."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio

from penstock.core.principals import INFERENCE_SCOPES, Principal
from penstock.endpoints.guard import needs_scope
from penstock.gateway.shared_memory.regions import SharedMemory, create_cuda_error
from penstock.pb.inference import grpc_service_pb2 as pb


class SharedMemoryGrpc:
    """The shared memory methods, which a gRPC server serves together with OipGrpc's methods."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    @needs_scope(*INFERENCE_SCOPES)
    async def SystemSharedMemoryStatus(
        self, message: pb.SystemSharedMemoryStatusRequest, principal: Principal
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in await asyncio.to_thread(self._memory.for_key(principal.key_id).status, message.name):
            status = answer.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return answer

    @needs_scope(*INFERENCE_SCOPES)
    async def SystemSharedMemoryRegister(
        self, message: pb.SystemSharedMemoryRegisterRequest, principal: Principal
    ) -> pb.SystemSharedMemoryRegisterResponse:
        register = self._memory.for_key(principal.key_id).register
        await asyncio.to_thread(register, message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    @needs_scope(*INFERENCE_SCOPES)
    async def SystemSharedMemoryUnregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest, principal: Principal
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await asyncio.to_thread(self._memory.for_key(principal.key_id).unregister, message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @needs_scope(*INFERENCE_SCOPES)
    async def CudaSharedMemoryStatus(
        self, message: pb.CudaSharedMemoryStatusRequest, principal: Principal
    ) -> pb.CudaSharedMemoryStatusResponse:
        if message.name:
            raise create_cuda_error(message.name)
        return pb.CudaSharedMemoryStatusResponse()

    @needs_scope(*INFERENCE_SCOPES)
    async def CudaSharedMemoryRegister(
        self, message: pb.CudaSharedMemoryRegisterRequest, principal: Principal
    ) -> pb.CudaSharedMemoryRegisterResponse:
        raise create_cuda_error(message.name)

    @needs_scope(*INFERENCE_SCOPES)
    async def CudaSharedMemoryUnregister(
        self, message: pb.CudaSharedMemoryUnregisterRequest, principal: Principal
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Succeed without doing anything, because clients unregister all regions when they start."""
        return pb.CudaSharedMemoryUnregisterResponse()
