"""An ONNX file's network as onnx reads it; weights in files beside it are not read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from pathlib import Path

import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec

_FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.DOUBLE: "fp64",
    TensorProto.BFLOAT16: "bf16",
}
_INT8_OPS = (
    "QLinear",
    "QuantizeLinear",
    "DynamicQuantize",
    "MatMulInteger",
    "ConvInteger",
    "QGemm",
    "QAttention",
)
_BRANCHING_OPS = ("Loop", "If", "Scan")


def read_network(file: Path) -> onnx.ModelProto:
    try:
        return onnx.load(file, format="protobuf", load_external_data=False)
    except Exception as error:
        raise ConfigError(f"{file}: is not an ONNX file: {error}", file=str(file)) from error


def read_precision(file: Path, inputs: Sequence[TensorSpec]) -> str:
    """int8 where the network quantizes what it computes with, else what most of its weights are in."""
    try:
        found = _precision(read_network(file).graph)
    except ConfigError:  # ONNX Runtime has a format of its own, too
        found = ""
    named = (spec.datatype.lower() for spec in inputs if spec.datatype.lower() in _FLOATS.values())
    return found or next(named, "fp32")


def _precision(network: onnx.GraphProto) -> str:
    if any(node.op_type.startswith(_INT8_OPS) for node in network.node):
        return "int8"
    elements: Counter[str] = Counter()
    for tensor in network.initializer:
        if tensor.data_type in _FLOATS:
            elements[_FLOATS[tensor.data_type]] += prod(tensor.dims)
    return max(elements, key=elements.__getitem__) if elements else ""


def has_branches(file: Path) -> bool:
    """Whether what is computed depends on the values of the input; False of formats that onnx does not read."""
    try:
        model = read_network(file)
    except ConfigError:
        return False
    nodes = chain(model.graph.node, *(function.node for function in model.functions))
    return any(node.op_type in _BRANCHING_OPS for node in nodes)


def data_files(model: onnx.ModelProto) -> dict[str, int]:
    """The files beside it that hold weights: name to the bytes that the network wants of it."""
    found: dict[str, int] = {}
    for tensor in _weights(model.graph):
        if uses_external_data(tensor):
            where = {entry.key: entry.value for entry in tensor.external_data}
            end = int(where.get("offset", 0)) + int(where.get("length", 0))
            name = where.get("location", "")
            found[name] = max(found.get(name, 0), end)
    return found


def _weights(network: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from network.initializer
    for node in network.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _weights(attribute.g)
