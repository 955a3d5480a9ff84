"""Other precisions of an ONNX file: INT8 weights for CPUs, FP16 for GPUs."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.core.error_text import first_line
from penstock.core.errors import ConfigError
from penstock.engines.onnx.network import data_files, read_network

RECIPE = 3  # counts up when a conversion below changes, so that files made by an older one are not taken
WEIGHTED_OPS = ("MatMul", "Gemm", "Conv")  # what INT8 makes faster, where a weight is among its inputs
MOST_BYTES = 2**31 - 2**20  # protobuf's limit of a file, less what a network takes; beyond it weights lie beside


def convert(source: Path, target: Path, precision: str) -> None:
    """Writes `target` whole or not at all, without calibration. Inputs and outputs keep their types."""
    with writing(source, target, precision) as partial:
        _CONVERSIONS[precision](source, partial)


@contextmanager
def writing(source: Path, target: Path, precision: str) -> Iterator[Path]:
    """As `placing`; what the converters raise, and that is whatever they meet, becomes a ConfigError."""
    try:
        with placing(target) as partial:
            yield partial
    except ConfigError:
        raise
    except Exception as error:
        message = f"{source}: cannot be converted to {precision}: {first_line(error)}"
        raise ConfigError(message, file=str(source)) from error


@contextmanager
def placing(target: Path) -> Iterator[Path]:
    """A path to write to; what was written there, and files beside it, then lies at `target` and beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        # The same name: a network with weights in a file beside it says that file's name.
        yield Path(folder) / target.name
        # The network last: a version exists once its model.onnx does.
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == target.name):
            shutil.move(file, target.parent / file.name)


def weight_files(file: Path) -> list[Path]:
    """The file, and those beside it that hold its weights."""
    if file.suffix == ".xml":
        return [file, *(beside for beside in [file.with_suffix(".bin")] if beside.is_file())]
    found = [file, *(file.parent / name for name in sorted(data_files(read_network(file))))]
    if missing := next((each for each in found if not each.is_file()), None):
        raise ConfigError(f"{file}: its weights are in {missing.name}, which is not there", file=str(file))
    return found


def weighted_nodes(file: Path) -> list[str]:
    """The operations with weights that INT8 would make faster, by their outputs' names; none: not worth converting."""
    network = read_network(file).graph
    weights = {tensor.name for tensor in network.initializer}
    return [node.output[0] for node in network.node if is_weighted(node, weights)]


def is_weighted(node: Any, initializers: set[str]) -> bool:
    return node.op_type in WEIGHTED_OPS and any(name in initializers for name in node.input[:2])


def is_large(file: Path) -> bool:
    return sum(each.stat().st_size for each in weight_files(file)) > MOST_BYTES


@contextmanager
def quietly() -> Iterator[None]:
    """The quantizer advises on the root logger to infer shapes first, which is done where it helps."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def _to_int8(source: Path, target: Path) -> None:
    """Weights to signed bytes with a scale for each channel, activations as they come: needs no calibration."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quietly():
        quantize_dynamic(
            source,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            use_external_data_format=is_large(source),
        )


def _to_fp16(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    is_split = sum(each.stat().st_size for each in weight_files(source)) / 2 > MOST_BYTES
    found = convert_float_to_float16(onnx.load(source), keep_io_types=True, disable_shape_infer=is_large(source))
    onnx.save(found, target, save_as_external_data=is_split, location=f"{target.name}.data" if is_split else None)


_CONVERSIONS: dict[str, Callable[[Path, Path], None]] = {"int8": _to_int8, "fp16": _to_fp16}
