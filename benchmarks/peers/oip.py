"""The Open Inference Protocol, as Triton, KServe and MLServer speak it: one request and one answer of each workload."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import HOST, MINILM, NOOP, SHARED, SRCNN, Item, Launch, Setting, http_post
from penstock.core.tensors import Tensor, pack_bytes
from penstock.experiments.load.payloads import Payload
from penstock.pb.inference import grpc_service_pb2 as pb

GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"


# Name, datatype and shape. The first dimension is that of the batch, which is how these servers put requests together.
SENT = {
    MINILM: ("text", "BYTES", (1, 1)),
    SRCNN: ("image", "BYTES", (1, 1)),
    NOOP: ("x", "FP32", (1, 256)),
}


def payload(workload: str, item: Item) -> Payload:
    data = np.ascontiguousarray(item, np.float32).tobytes() if workload == NOOP else pack_bytes([item])
    return Payload(workload, (Tensor(*SENT[workload], data),))


def json_request(workload: str, data: list[Any], **parameters: Any) -> bytes:
    """For a server, or a tensor, that REST does not take in binary."""
    tensor = {**dict(zip(("name", "datatype", "shape"), SENT[workload], strict=True)), "data": data}
    body = json.dumps({"inputs": [tensor], **({"parameters": parameters} if parameters else {})}).encode()
    return http_post(f"/v2/models/{workload}/infer", "application/json", body)


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


class OipPeer:
    """A server that speaks the protocol with binary tensors, both ways."""

    name: str
    title: str
    grpc_method = GRPC_METHOD

    def protocols(self, workload: str) -> Sequence[str]:
        return ("grpc", "rest")

    def refusal(self, workload: str, comparison: str) -> str:
        return ""

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        asked = payload(workload, item)
        return asked.grpc() if protocol == "grpc" else asked.rest()

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        return grpc_answer(workload, body) if protocol == "grpc" else binary_answer(workload, body)


def launch(command: Sequence[object], workload: str, rest: int, grpc: int, *import_from: Path) -> Launch:
    return Launch(
        command=[str(word) for word in command],
        environment={"PYTHONPATH": ":".join(map(str, (SHARED, *import_from)))},
        targets={"rest": f"{HOST}:{rest}", "grpc": f"{HOST}:{grpc}", "stream": f"{HOST}:{grpc}"},
        ready_url=f"http://{HOST}:{rest}/v2/models/{workload}/ready",
    )


def engine_setting(name: str, defaults: Mapping[str, Any], engine: str, **values: Any) -> Setting:
    """OpenVINO in BF16 is the model's own doing, and a candidate for the best alone."""
    return Setting(f"OpenVINO BF16, {name}" if engine == "openvino" else name, {**defaults, "engine": engine, **values})
