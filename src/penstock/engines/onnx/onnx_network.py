"""Reads the inputs, outputs and precision of an ONNX file, without loading weights that are in separate files."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, NUMPY_TYPES, TensorSpec

_FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.DOUBLE: "fp64",
    TensorProto.BFLOAT16: "bf16",
}
_DATATYPES: dict[int, str] = {
    **{helper.np_dtype_to_tensor_dtype(dtype): datatype for datatype, dtype in NUMPY_TYPES.items()},
    TensorProto.STRING: BYTES,
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
# Kinds of faults in a file.
TORN, NO_NETWORK, NO_DATA, SHORT_DATA = "torn", "no_network", "no_data", "short_data"


def read_network(file: Path) -> onnx.ModelProto:
    try:
        return onnx.load(file, format="protobuf", load_external_data=False)
    except Exception as error:
        raise ConfigError(f"{file}: is not an ONNX file: {error}", file=str(file)) from error


def examine_onnx(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and a description of each fault in the file; weights in separate files are not read."""
    with file.open("rb") as opened:
        head = opened.read(8)
    if head[4:] == b"ORTM":  # ONNX Runtime's own format, which only ONNX Runtime reads
        return
    try:
        model = read_network(file)
    except ConfigError:
        if head[:1] == b"\x08":  # an ONNX file begins with its ir_version, a small number
            yield TORN, f"{file} begins as an ONNX file, but does not end as one ({file.stat().st_size:,} bytes)"
        else:
            yield NO_NETWORK, f"{file} is not an ONNX file"
        return
    if not model.ir_version or not model.graph.ListFields():
        yield NO_NETWORK, f"{file} is not an ONNX file, or contains no network"
        return
    for name, size_bytes in data_files(model).items():
        data = file.parent / name
        if not data.is_file():
            yield NO_DATA, f"{file} stores weights in '{name}', which is missing from its folder"
        elif (found := data.stat().st_size) < size_bytes:
            yield SHORT_DATA, f"{data} has {found:,} bytes, but {file.name} needs {size_bytes:,}"


def read_tensors(file: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the network's inputs and outputs.

    Raise ConfigError if the file is not ONNX, or if an input or output is not a tensor.
    """
    network = read_network(file).graph
    return tuple(_to_spec(value, file) for value in _inputs(network)), tuple(
        _to_spec(value, file) for value in network.output
    )


def has_row_inputs(file: Path) -> bool:
    """Return whether every input has at most two dimensions, such as tokens or features; False if unknown."""
    try:
        shapes = [value.type.tensor_type for value in _inputs(read_network(file).graph)]
    except ConfigError:  # ONNX Runtime also has a format of its own
        return False
    return all(shape.HasField("shape") and len(shape.shape.dim) <= 2 for shape in shapes)


def _inputs(network: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    constants = {tensor.name for tensor in network.initializer}
    return [value for value in network.input if value.name not in constants]


def _to_spec(value: onnx.ValueInfoProto, file: Path) -> TensorSpec:
    tensor_type = value.type.tensor_type
    datatype = _DATATYPES.get(tensor_type.elem_type)
    if datatype is None or not tensor_type.HasField("shape"):
        raise ConfigError(
            f"{file}: '{value.name}' is not a tensor of a known shape", reason="no_tensor", file=str(file)
        )
    return TensorSpec(value.name, datatype, tuple(size.dim_value or -1 for size in tensor_type.shape.dim))


def read_precision(file: Path, inputs: Sequence[TensorSpec]) -> str:
    """Return int8 if the network is quantized, otherwise the precision of most weights."""
    try:
        found = _find_precision(read_network(file).graph)
    except ConfigError:  # ONNX Runtime also has a format of its own
        found = ""
    named = (spec.datatype.lower() for spec in inputs if spec.datatype.lower() in _FLOATS.values())
    return found or next(named, "fp32")


def _find_precision(network: onnx.GraphProto) -> str:
    if any(node.op_type.startswith(_INT8_OPS) for node in network.node):
        return "int8"
    elements: Counter[str] = Counter()
    for tensor in network.initializer:
        if tensor.data_type in _FLOATS:
            elements[_FLOATS[tensor.data_type]] += prod(tensor.dims)
    return max(elements, key=elements.__getitem__) if elements else ""


def has_branches(file: Path) -> bool:
    """Return whether the network has loops or branches; False if onnx cannot read the file."""
    try:
        model = read_network(file)
    except ConfigError:
        return False
    nodes = chain(model.graph.node, *(function.node for function in model.functions))
    return any(node.op_type in _BRANCHING_OPS for node in nodes)


def data_files(model: onnx.ModelProto) -> dict[str, int]:
    """Return the separate files with the network's weights, and how many bytes each file must have."""
    found: dict[str, int] = {}
    for tensor in _iterate_weights(model.graph):
        if uses_external_data(tensor):
            where = {entry.key: entry.value for entry in tensor.external_data}
            end = int(where.get("offset", 0)) + int(where.get("length", 0))
            name = where.get("location", "")
            found[name] = max(found.get(name, 0), end)
    return found


def _iterate_weights(network: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from network.initializer
    for node in network.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _iterate_weights(attribute.g)
