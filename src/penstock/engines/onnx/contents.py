"""What is wrong with an ONNX file as a file: cut off, of another kind, or without its weights."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TORN, NO_GRAPH, NO_DATA, SHORT_DATA = "torn", "no_graph", "no_data", "short_data"


def examine_onnx(file: Path) -> list[tuple[str, str]]:
    """A kind and a sentence for each fault. The file is read whole, the weights beside it are not."""
    import onnx
    from google.protobuf.message import DecodeError

    data = file.read_bytes()
    if data[4:8] == b"ORTM":  # ONNX Runtime's own format, which it alone reads
        return []
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        # An ONNX file begins with its ir_version, which is a small number.
        if data[:1] == b"\x08":
            return [(TORN, f"{file} begins as an ONNX file, but does not end as one ({len(data):,} bytes)")]
        return [(NO_GRAPH, f"{file} is no ONNX file")]
    if not model.ir_version or not model.graph.ListFields():
        return [(NO_GRAPH, f"{file} is no ONNX file, or holds no graph")]
    return [fault for name, size in _data_files(model).items() for fault in _examine_data(file, name, size)]


def _examine_data(file: Path, name: str, size_bytes: int) -> Iterator[tuple[str, str]]:
    data = file.parent / name
    if not data.is_file():
        yield NO_DATA, f"{file} keeps weights in '{name}', which is not beside it"
    elif data.stat().st_size < size_bytes:
        found = data.stat().st_size
        yield SHORT_DATA, f"{data} has {found:,} bytes, and {file.name} wants {size_bytes:,} of it"


def _data_files(model: Any) -> Mapping[str, int]:
    """Name to the bytes that the graph wants of it."""
    found: dict[str, int] = {}
    for tensor in _weights(model.graph):
        if not tensor.external_data:
            continue
        where = {entry.key: entry.value for entry in tensor.external_data}
        end = int(where.get("offset", 0)) + int(where.get("length", 0))
        name = where.get("location", "")
        found[name] = max(found.get(name, 0), end)
    return found


def _weights(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _weights(attribute.g)
