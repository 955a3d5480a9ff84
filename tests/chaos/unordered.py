"""A gRPC stream with answers in any order: matches each answer with its caller, and counts duplicates."""

import asyncio
from itertools import count

import grpc

from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub

Arrived = tuple[int, pb.ModelStreamInferResponse]  # its place among all answers of the stream, and the answer


class UnorderedStream:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.duplicates = 0
        self._stream = GRPCInferenceServiceStub(channel).ModelStreamInfer(metadata=(("penstock-unordered", "1"),))
        self._pending: dict[str, asyncio.Future[Arrived]] = {}
        self._seen: set[str] = set()
        self._writing = asyncio.Lock()  # a stream takes one write at a time
        self._reader = asyncio.create_task(self._read())

    async def ask(self, message: pb.ModelInferRequest) -> Arrived:
        future: asyncio.Future[Arrived] = asyncio.get_running_loop().create_future()
        self._pending[message.id] = future
        try:
            async with self._writing:
                await self._stream.write(message)
            return await future
        finally:
            del self._pending[message.id]

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        arrivals = count()
        async for answer in self._stream:
            identity = answer.infer_response.id
            self.duplicates += identity in self._seen
            self._seen.add(identity)
            future = self._pending.get(identity)
            if future is not None and not future.done():
                future.set_result((next(arrivals), answer))
