"""The description of a peer: how to start it, load it and check its answers."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

HOST = "127.0.0.1"
SHARED = Path(__file__).parent / "shared"  # code that the peers' own processes import
# What is served. An item of each: a text, a JPEG file, a float32 array [1, 256].
MINILM, SRCNN, NOOP = "minilm", "srcnn", "noop"
# SAME: the same ONNX file on ONNX Runtime in FP32. BEST: whatever the server does best, within the accuracy asked for.
SAME, BEST = "same", "best"
Item = Any  # str | bytes | numpy array


@dataclass(frozen=True, slots=True)
class Assets:
    """The model files that every server serves."""

    minilm: Path  # a folder: model.onnx (input_ids, attention_mask → sentence_embedding), tokenizer.json
    minilm_torch: Path  # a folder in Hugging Face's form: model.safetensors, config.json, tokenizer.json
    srcnn: Path  # a folder: model.onnx (luminance → luminance_sr, [n, 1, h, w])
    noop: Path  # a folder: model.onnx (x → y, [n, 256])

    def folder(self, workload: str) -> Path:
        return {MINILM: self.minilm, SRCNN: self.srcnn, NOOP: self.noop}[workload].resolve()


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration of a server; the search measures all and keeps the best."""

    name: str  # the text in the table: "2 workers, 1 thread, no batching"
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts a server, its addresses, and the URL that shows that it is ready."""

    command: Sequence[str]
    environment: Mapping[str, str]  # added to the benchmark's environment
    targets: Mapping[str, str]  # protocol ("rest", "grpc") to host:port
    ready_url: str  # a URL that answers 200 when the model can be called
    stop_command: Sequence[str] = ()  # needed if ending the process does not end the server


class Peer(Protocol):
    name: str  # name of the peer's folder
    title: str  # "Ray Serve 2.60.0"
    grpc_method: str  # "/package.Service/Method"; empty where there is no gRPC

    def protocols(self, workload: str) -> Sequence[str]:
        """Return `rest`, `grpc` or both: the protocols that the server offers for this workload, the fastest first."""
        ...

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        """Return the settings to try. If there are none, the server cannot take part, and `refusal` says why."""
        ...

    def refusal(self, workload: str, comparison: str) -> str:
        return ""

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        """Return how to start the server.

        `folder` is empty and used by this server only; `python` is that of its venv.
        """
        ...

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        """Return a whole HTTP/1.1 request with its head, or a serialized gRPC message."""
        ...

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        """Return the content of an answer: a float32 array [384], the bytes of a PNG, or a float32 array [1, 256]."""
        ...


def decode_numbers(workload: str, raw: bytes) -> Any:
    """Return the array in the result of `answer`."""
    return np.frombuffer(raw, np.float32).reshape((1, 256) if workload == NOOP else -1)


def build_http_post(path: str, content_type: str, body: bytes) -> bytes:
    """Return a whole HTTP/1.1 request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def find_free_ports(count: int) -> list[int]:
    """Return different free ports."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
