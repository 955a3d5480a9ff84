"""The Open Inference Protocol's shared memory methods over gRPC."""

import asyncio

from penstock.gateway.grpc.oip import Context
from penstock.gateway.shared_memory.regions import SharedMemory, no_cuda
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc


class SharedMemoryGrpc(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Beside OipGrpc on one server: each answers for the methods that it has."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    async def SystemSharedMemoryStatus(  # noqa: N802
        self, message: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in await asyncio.to_thread(self._memory.status, message.name):
            status = answer.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return answer

    async def SystemSharedMemoryRegister(  # noqa: N802
        self, message: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        await asyncio.to_thread(self._memory.register, message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(  # noqa: N802
        self, message: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await asyncio.to_thread(self._memory.unregister, message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(  # noqa: N802
        self, message: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        if message.name:
            raise no_cuda(message.name)
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(  # noqa: N802
        self, message: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        raise no_cuda(message.name)

    async def CudaSharedMemoryUnregister(  # noqa: N802
        self, message: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Clients unregister all before they begin, whether there are any or not."""
        return pb.CudaSharedMemoryUnregisterResponse()
