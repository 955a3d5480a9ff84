"""Items and answers as raw bytes, for peers whose handlers get the unchanged body of a request."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue

from benchmarks.peers.peer import BEST, NOOP, SRCNN, Assets, Item, Peer, Setting, build_http_post, decode_numbers

Candidates = Mapping[str, Mapping[str, Mapping[str, Any]]]  # values of settings, by workload and name


def encode_body(item: Item) -> bytes:
    if isinstance(item, str):
        return item.encode()
    return item if isinstance(item, bytes) else np.ascontiguousarray(item, np.float32).tobytes()


def describe_handler(workload: str, assets: Assets, values: Any) -> dict[str, Any]:
    """Return the arguments of Handler in shared/handler.py for a setting's values."""
    given = {key: values[key] for key in ("engine", "threads", "alike") if key in values}
    return {"workload": workload, "folder": str(assets.folder(workload)), **given}


class RawPeer(Peer):
    """A server whose handler takes the bytes of one route; in the group "best" it calls OpenVINO itself."""

    grpc_method = ""
    route = "/predict"
    candidates: Candidates

    def protocols(self, workload: str) -> Sequence[str]:
        return ("rest", "grpc") if self.grpc_method else ("rest",)

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        is_openvino = comparison == BEST and workload != NOOP
        suffix, engine = (", OpenVINO", {"engine": "openvino"}) if is_openvino else ("", {})
        return [Setting(name + suffix, {**values, **engine}) for name, values in self.candidates[workload].items()]

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        if protocol == "grpc":
            return BytesValue(value=encode_body(item)).SerializeToString()
        return build_http_post(self.route, "application/octet-stream", encode_body(item))

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        raw = BytesValue.FromString(body).value if protocol == "grpc" else body
        return raw if workload == SRCNN else decode_numbers(workload, raw)
