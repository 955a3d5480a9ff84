"""Single calls of the Open Inference Protocol over gRPC: their messages, and their results."""

from collections.abc import Awaitable, Sequence

import grpc

from penstock.core.tensors import pack_bytes
from penstock.pb.inference import grpc_service_pb2 as pb

RequestTensor = tuple[str, str, Sequence[int], bytes]  # its name, datatype, shape and data


def make_infer_request(model: str, *inputs: RequestTensor, output: str = "") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[data for *_, data in inputs])
    for name, datatype, shape, _ in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    if output:
        message.outputs.add(name=output)
    return message


def make_text_request(model: str, *texts: str | bytes) -> pb.ModelInferRequest:
    return make_infer_request(model, ("text", "BYTES", (len(texts),), pack_bytes(texts)))


async def get_status_name(call: Awaitable[object]) -> str:
    """Return the name of the gRPC status of a call."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"
