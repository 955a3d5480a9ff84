"""Build the requests of a load as bytes: texts, query-passage pairs, photographs or a tensor."""

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
from penstock.experiments.load.msmarco import Pair, read_pairs
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
        """Return an HTTP/1.1 request that contains binary tensors and asks for binary outputs."""
        inputs = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in self.inputs
        ]
        header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = b"".join([header, *(tensor.data for tensor in self.inputs)])
        headers = f"Inference-Header-Content-Length: {len(header)}\r\n"
        return build_http_post(f"/v2/models/{self.model}/infer", body, "application/octet-stream", key, headers)


def build_http_post(path: str, body: bytes, content_type: str, key: str, headers: str = "") -> bytes:
    """Return the bytes of an HTTP/1.1 POST request. `headers` are additional header lines."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n{headers}{authorization}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def build_noop(model: str, rows: int = 1) -> Payload:
    data = np.random.default_rng(0).random((rows, NOOP_FLOATS), dtype=np.float32).tobytes()
    return Payload(model, (Tensor("x", "FP32", (rows, NOOP_FLOATS), data),))


def encode(payloads: Iterable[Payload], protocol: str, key: str = "") -> list[bytes]:
    return [payload.rest(key) if protocol == "rest" else payload.grpc() for payload in payloads]


def build_built_in_payloads(kind: str, model: str, batch_size: int = 1, msmarco: Path | None = None) -> list[Payload]:
    """Return requests of built-in data with `batch_size` items each. A pair of two texts counts as one item.

    Texts come from MS MARCO if its path is given, otherwise from the package.
    """
    if kind == "noop":
        return [build_noop(model, batch_size)]
    if kind == "photos":
        return build_column_payloads(model, {"image": photos()}, batch_size)
    if kind not in TEXTS:
        raise InvalidRequest(f"unknown data '{kind}'; choose one of {', '.join(KINDS)}")
    requests = (
        list(chain.from_iterable(group)) for group in _split_into_groups(_list_text_items(kind, msmarco), batch_size)
    )
    return [Payload(model, (_build_tensor("text", (len(texts),), texts),)) for texts in requests]


def _list_text_items(kind: str, msmarco: Path | None) -> list[tuple[str, ...]]:
    if kind == "mixed" and msmarco is None:
        return [(text,) for text in mixed(COUNT, 0)]
    pairs = list_text_pairs(msmarco)
    if kind == "pairs":
        return list(pairs)
    asked, given = ([(pair[side],) for pair in pairs] for side in (0, 1))
    if kind != "mixed":
        return list(asked if kind == "queries" else given)
    both = [*asked, *given]
    random.Random(0).shuffle(both)
    return list(both)


def list_text_pairs(msmarco: Path | None = None) -> list[Pair]:
    """Return query-passage pairs of MS MARCO if its path is given, otherwise of the package."""
    return read_pairs(msmarco) if msmarco else list(zip(queries(), passages(), strict=True))


def build_column_payloads(model: str, columns: Mapping[str, Sequence[str | bytes]], items: int) -> list[Payload]:
    """Return requests of `items` rows with one tensor per column. Fill up the last request from the first rows."""
    groups = zip(*(_split_into_groups(values, items) for values in columns.values()), strict=True)
    return [
        Payload(
            model, tuple(_build_tensor(name, (items, 1), values) for name, values in zip(columns, group, strict=True))
        )
        for group in groups
    ]


def _split_into_groups(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Divide all items into groups of `size`. Fill up the last group from the first items."""
    count = -(-len(items) // size)
    endless = cycle(items)
    return (list(islice(endless, size)) for _ in range(count))


def _build_tensor(name: str, shape: tuple[int, ...], values: Sequence[str | bytes]) -> Tensor:
    return Tensor(name, "BYTES", shape, pack_bytes(list(values)))
