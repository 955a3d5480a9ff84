"""The requests that load carries: texts, query-passage pairs, photographs or a tensor; built once, as bytes."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from penstock.core.errors import InvalidRequest
from penstock.core.tensors import Tensor, pack_bytes
from penstock.experiments.load.msmarco import read_pairs
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import mixed, passages, queries
from penstock.pb.inference import grpc_service_pb2 as pb

COUNT = 1024
NOOP_FLOATS = 256  # 1 KB
TEXTS = ("mixed", "queries", "passages", "pairs")
KINDS = (*TEXTS, "photos", "noop")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Payload:
    model: str
    inputs: tuple[Tensor, ...]

    def message(self) -> pb.ModelInferRequest:
        message = pb.ModelInferRequest(model_name=self.model)
        for tensor in self.inputs:
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(bytes(tensor.data))
        return message

    def grpc(self) -> bytes:
        return bytes(self.message().SerializeToString())

    def rest(self, key: str = "") -> bytes:
        """A whole HTTP/1.1 request with the tensors in binary, both ways."""
        described = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in self.inputs
        ]
        header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        body = b"".join([header, *(tensor.data for tensor in self.inputs)])
        further = f"Inference-Header-Content-Length: {len(header)}\r\n"
        return http_post(f"/v2/models/{self.model}/infer", body, "application/octet-stream", key, further)


def http_post(path: str, body: bytes, content_type: str, key: str, further: str = "") -> bytes:
    """A whole HTTP/1.1 request; `further` are lines of headers."""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n{further}{shown}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def noop(model: str, rows: int = 1) -> Payload:
    data = np.random.default_rng(0).random((rows, NOOP_FLOATS), dtype=np.float32).tobytes()
    return Payload(model, (Tensor("x", "FP32", (rows, NOOP_FLOATS), data),))


def encode(payloads: Iterable[Payload], protocol: str, key: str = "") -> list[bytes]:
    return [payload.rest(key) if protocol == "rest" else payload.grpc() for payload in payloads]


def build(kind: str, model: str, batch_size: int = 1, msmarco: Path | None = None) -> list[Payload]:
    """Requests of `batch_size` items each; `pairs` count as one item and are two texts.

    Texts are those of the package, or those of MS MARCO where its path is given.
    """
    if kind == "noop":
        return [noop(model, batch_size)]
    if kind == "photos":
        return of_columns(model, {"image": photos()}, batch_size)
    if kind not in TEXTS:
        raise InvalidRequest(f"unknown data '{kind}'; there are {', '.join(KINDS)}")
    requests = (list(chain.from_iterable(group)) for group in _groups(_text_items(kind, msmarco), batch_size))
    return [Payload(model, (_tensor("text", (len(texts),), texts),)) for texts in requests]


def _text_items(kind: str, msmarco: Path | None) -> list[tuple[str, ...]]:
    if kind == "mixed" and msmarco is None:
        return [(text,) for text in mixed(COUNT, 0)]
    pairs = read_pairs(msmarco) if msmarco else list(zip(queries(), passages(), strict=True))
    if kind == "pairs":
        return list(pairs)
    asked, given = ([(pair[side],) for pair in pairs] for side in (0, 1))
    if kind != "mixed":
        return list(asked if kind == "queries" else given)
    both = [*asked, *given]
    random.Random(0).shuffle(both)
    return list(both)


def of_columns(model: str, columns: Mapping[str, Sequence[str | bytes]], items: int) -> list[Payload]:
    """Requests of `items` rows with a tensor for each column; the last is filled from the beginning."""
    groups = zip(*(_groups(values, items) for values in columns.values()), strict=True)
    return [
        Payload(model, tuple(_tensor(name, (items, 1), values) for name, values in zip(columns, group, strict=True)))
        for group in groups
    ]


def _groups(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Every item at least once; the last group is filled from the beginning."""
    count = -(-len(items) // size)
    endless = cycle(items)
    return (list(islice(endless, size)) for _ in range(count))


def _tensor(name: str, shape: tuple[int, ...], values: Sequence[str | bytes]) -> Tensor:
    return Tensor(name, "BYTES", shape, pack_bytes(list(values)))
