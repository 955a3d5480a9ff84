"""The Open Inference Protocol of Triton, KServe and MLServer: one request and one answer per workload."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import (
    BEST,
    HOST,
    MINILM,
    NOOP,
    SHARED,
    SRCNN,
    Item,
    Launch,
    Peer,
    Setting,
    build_http_post,
    decode_numbers,
)
from penstock.core.tensors import Tensor, pack_bytes
from penstock.experiments.load.drivers import INFER
from penstock.experiments.load.payloads import Payload
from penstock.pb.inference import grpc_service_pb2 as pb

Values = Mapping[str, Any]
# Name, datatype and shape. The first dimension is that of the batch, which is how these servers put requests together.
SENT = {
    MINILM: ("text", "BYTES", (1, 1)),
    SRCNN: ("image", "BYTES", (1, 1)),
    NOOP: ("x", "FP32", (1, 256)),
}


def make_json_request(workload: str, data: list[Any], **parameters: Any) -> bytes:
    """Return a JSON request, for servers or tensors without binary REST."""
    tensor = {**dict(zip(("name", "datatype", "shape"), SENT[workload], strict=True)), "data": data}
    body = json.dumps({"inputs": [tensor], **({"parameters": parameters} if parameters else {})}).encode()
    return build_http_post(f"/v2/models/{workload}/infer", "application/json", body)


def value(workload: str, raw: bytes) -> Any:
    """Return the value of an element; SRCNN's follows the element's length."""
    return raw[4:] if workload == SRCNN else decode_numbers(workload, raw)


class OipPeer(Peer):
    """A server that accepts and returns binary tensors."""

    grpc_method = INFER
    defaults: Values  # of the values of its settings
    candidates: Mapping[str, Mapping[str, Values]]  # by workload and name: what is not as in `defaults`

    def protocols(self, workload: str) -> Sequence[str]:
        return ("grpc", "rest")

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        """Return the candidates. OpenVINO in BF16 is done by the model, and is only a candidate of the group "best"."""
        is_openvino = comparison == BEST and workload != NOOP
        prefix, engine = ("OpenVINO BF16, ", "openvino") if is_openvino else ("", "onnx")
        return [
            Setting(prefix + name, {**self.defaults, "engine": engine, **values})
            for name, values in self.candidates[workload].items()
        ]

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        data = np.ascontiguousarray(item, np.float32).tobytes() if workload == NOOP else pack_bytes([item])
        asked = Payload(workload, (Tensor(*SENT[workload], data),))
        return asked.grpc() if protocol == "grpc" else asked.rest()

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        if protocol == "grpc":
            return value(workload, pb.ModelInferResponse.FromString(body).raw_output_contents[0])
        # The tensor is behind the JSON; where that ends is only in the head of the answer, so the JSON says it.
        _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
        return value(workload, body[end:])


def launch(command: Sequence[object], workload: str, rest: int, grpc: int, *import_from: Path) -> Launch:
    return Launch(
        command=[str(word) for word in command],
        environment={"PYTHONPATH": ":".join(map(str, (SHARED, *import_from)))},
        targets={"rest": f"{HOST}:{rest}", "grpc": f"{HOST}:{grpc}", "stream": f"{HOST}:{grpc}"},
        ready_url=f"http://{HOST}:{rest}/v2/models/{workload}/ready",
    )
