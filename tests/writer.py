"""A small server of the inference protocol that sends generated text like a text-generation model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np

from penstock.core.tensors import Array, from_array
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc as rpc
from tests.stub_server import stub_serving

PARTS = ("Once", " upon", " a time")


def answer(
    texts: Sequence[str], index: Sequence[int], finish: str, tokens: int, is_final: bool
) -> pb.ModelInferResponse:
    arrays: dict[str, Array] = {
        "text_output": np.array([text.encode() for text in texts], object),
        "index": np.array(index, np.int32),
        "finish_reason": np.array([finish.encode()] * len(texts), object),
        "usage": np.array([5, tokens, -1], np.int32),
    }
    found = pb.ModelInferResponse(model_name="m", model_version="1")
    for name, array in arrays.items():
        tensor = from_array(name, array)
        found.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        found.raw_output_contents.append(bytes(tensor.data))
    found.parameters["triton_final_response"].bool_param = is_final
    return found


@dataclass
class Writer(rpc.GRPCInferenceServiceServicer):
    """A server that generates text; the requested model selects the server's behaviour.

    Model `m` writes; `silent` stops after its first part; `flaky` refuses its first request; `lost` fails after its
    first part.
    """

    address: str = ""
    requests: list[pb.ModelInferRequest] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # a call that was abandoned

    async def ModelInfer(
        self, message: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        self.requests.append(message)
        if message.model_name == "flaky" and len(self.requests) == 1:
            trailing = (("penstock-code", "queue_full"), ("retry-after", "0"))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailing)
        if message.model_name == "silent":
            await self._wait()
        count = message.parameters["n"].int64_param or 1
        return answer(["".join(PARTS)] * count, range(count), "stop", 3 * count, True)

    async def ModelStreamInfer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for message in messages:
            self.requests.append(message)
            if message.model_name == "flaky" and len(self.requests) == 1:
                yield self._failed("queue_full")
                return
            for number, text in enumerate(PARTS):
                is_last = number == len(PARTS) - 1
                part = answer([text], [0], "length" if is_last else "", number + 1, is_last)
                yield pb.ModelStreamInferResponse(infer_response=part)
                if message.model_name == "silent":
                    await self._wait()
                if message.model_name == "lost":
                    yield self._failed("worker_lost")
                    return

    def _failed(self, code: str) -> pb.ModelStreamInferResponse:
        failed = pb.ModelInferResponse()
        failed.parameters["penstock-code"].string_param = code
        failed.parameters["retry_after_s"].double_param = 0.0
        return pb.ModelStreamInferResponse(error_message="no", infer_response=failed)

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.ended.set()
            raise


@asynccontextmanager
async def writing() -> AsyncIterator[Writer]:
    edge = Writer()
    async with stub_serving(edge) as edge.address:
        yield edge
