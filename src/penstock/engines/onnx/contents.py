"""What is wrong with an ONNX file as a file: cut off, of another kind, or without its weights."""

from collections.abc import Iterator
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.engines.onnx.network import data_files, read_network

TORN, NO_NETWORK, NO_DATA, SHORT_DATA = "torn", "no_network", "no_data", "short_data"


def examine_onnx(file: Path) -> list[tuple[str, str]]:
    """A kind and a sentence for each fault. The file is read whole, the weights beside it are not."""
    with file.open("rb") as opened:
        head = opened.read(8)
    if head[4:] == b"ORTM":  # ONNX Runtime's own format, which it alone reads
        return []
    try:
        model = read_network(file)
    except ConfigError:
        # An ONNX file begins with its ir_version, which is a small number.
        if head[:1] == b"\x08":
            size_bytes = file.stat().st_size
            return [(TORN, f"{file} begins as an ONNX file, but does not end as one ({size_bytes:,} bytes)")]
        return [(NO_NETWORK, f"{file} is no ONNX file")]
    if not model.ir_version or not model.graph.ListFields():
        return [(NO_NETWORK, f"{file} is no ONNX file, or holds no network")]
    return [fault for name, size in data_files(model).items() for fault in _examine_data(file, name, size)]


def _examine_data(file: Path, name: str, size_bytes: int) -> Iterator[tuple[str, str]]:
    data = file.parent / name
    if not data.is_file():
        yield NO_DATA, f"{file} keeps weights in '{name}', which is not beside it"
    elif data.stat().st_size < size_bytes:
        found = data.stat().st_size
        yield SHORT_DATA, f"{data} has {found:,} bytes, and {file.name} wants {size_bytes:,} of it"
