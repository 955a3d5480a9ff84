"""The Open Inference Protocol, as Triton, KServe and MLServer speak it: one request and one answer of each workload."""

import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.peers.peer import MINILM, NOOP, SRCNN, Item
from penstock.core.tensors import pack_bytes
from penstock.pb.inference import grpc_service_pb2 as pb

GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Sent:
    """The first dimension is that of the batch, which is how these servers put requests together."""

    name: str
    datatype: str
    shape: tuple[int, int]


SENT = {
    MINILM: Sent("text", "BYTES", (1, 1)),
    SRCNN: Sent("image", "BYTES", (1, 1)),
    NOOP: Sent("x", "FP32", (1, 256)),
}


def grpc_request(workload: str, item: Item) -> bytes:
    message = pb.ModelInferRequest(model_name=workload, raw_input_contents=[packed(workload, item)])
    sent = SENT[workload]
    message.inputs.add(name=sent.name, datatype=sent.datatype, shape=sent.shape)
    return bytes(message.SerializeToString())


def binary_request(workload: str, item: Item) -> bytes:
    """REST with the tensor behind the JSON, both ways."""
    data = packed(workload, item)
    tensor = {**asdict(SENT[workload]), "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return post(
        workload,
        header + data,
        f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(header)}\r\n",
    )


def json_request(workload: str, data: list[Any], **parameters: Any) -> bytes:
    """For a server, or a tensor, that REST does not take in binary."""
    tensor = {**asdict(SENT[workload]), "data": data}
    body = json.dumps({"inputs": [tensor], **({"parameters": parameters} if parameters else {})}).encode()
    return post(workload, body, "Content-Type: application/json\r\n")


def post(workload: str, body: bytes, headers: str) -> bytes:
    head = (
        f"POST /v2/models/{workload}/infer HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def packed(workload: str, item: Item) -> bytes:
    return np.ascontiguousarray(item, np.float32).tobytes() if workload == NOOP else pack_bytes([item])


def grpc_answer(workload: str, body: bytes) -> Any:
    return value(workload, pb.ModelInferResponse.FromString(body).raw_output_contents[0])


def binary_answer(workload: str, body: bytes) -> Any:
    """REST with the tensor behind the JSON; where that ends is only in the head of the answer, so the JSON says it."""
    _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    return value(workload, body[end:])


def value(workload: str, raw: bytes) -> Any:
    if workload == SRCNN:
        return raw[4:]  # behind the length of the only element
    array = np.frombuffer(raw, np.float32)
    return array.reshape(1, 256) if workload == NOOP else array


def free_ports(count: int) -> list[int]:
    """All are held until all are found, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
