"""The requests that the load generator sends, built once as bytes."""

import json
from dataclasses import dataclass

import numpy as np

from penstock.bench.photos import photos
from penstock.bench.texts import mixed, passages, queries
from penstock.core.tensors import pack_bytes
from penstock.pb.inference import grpc_service_pb2 as pb

COUNT = 1024
NOOP_FLOATS = 256  # 1 KB


@dataclass(frozen=True, slots=True)
class Payload:
    model: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    def grpc(self) -> bytes:
        message = pb.ModelInferRequest(model_name=self.model, raw_input_contents=[self.data])
        message.inputs.add(name=self.name, datatype=self.datatype, shape=self.shape)
        return bytes(message.SerializeToString())

    def rest(self) -> bytes:
        """A whole HTTP/1.1 request with the tensor in binary, both ways."""
        tensor = {
            "name": self.name,
            "datatype": self.datatype,
            "shape": self.shape,
            "parameters": {"binary_data_size": len(self.data)},
        }
        header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        return (
            f"POST /v2/models/{self.model}/infer HTTP/1.1\r\nHost: localhost\r\n"
            f"Inference-Header-Content-Length: {len(header)}\r\n"
            f"Content-Type: application/octet-stream\r\n"
            f"Content-Length: {len(header) + len(self.data)}\r\n\r\n"
        ).encode() + (header + self.data)


def build(kind: str, model: str) -> list[Payload]:
    """`mixed`, `queries` and `passages` are real texts, one a request; `photos` are real; `noop` is 1 KB."""
    if kind == "noop":
        data = np.random.default_rng(0).random(NOOP_FLOATS, dtype=np.float32).tobytes()
        return [Payload(model, "x", "FP32", (1, NOOP_FLOATS), data)]
    if kind == "photos":
        return [Payload(model, "image", "BYTES", (1, 1), pack_bytes([photo])) for photo in photos()]
    texts = {"mixed": lambda: mixed(COUNT, 0), "queries": queries, "passages": passages}[kind]()
    return [Payload(model, "text", "BYTES", (1,), pack_bytes([text])) for text in texts]
