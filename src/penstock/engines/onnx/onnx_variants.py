"""Converts an ONNX file to another precision: INT8 weights for CPUs, FP16 for GPUs."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.core.error_text import get_first_line
from penstock.core.errors import ConfigError
from penstock.engines.onnx.onnx_network import data_files, read_network

RECIPE = 3  # increase this number when a conversion below changes, so that older files are not used
WEIGHTED_OPS = ("MatMul", "Gemm", "Conv")  # INT8 makes these faster if a weight is among the inputs
MOST_BYTES = 2**31 - 2**20  # protobuf's limit for a file, minus room for the network; larger weights go beside it


def convert(source: Path, target: Path, precision: str) -> None:
    """Write the model in `precision` to `target`, completely or not at all. No calibration data is needed.

    The types of inputs and outputs do not change.
    """
    with converting_to(source, target, precision) as partial:
        _CONVERSIONS[precision](source, partial)


@contextmanager
def converting_to(source: Path, target: Path, precision: str) -> Iterator[Path]:
    """Yield a temporary path for the converted file, and then move it to `target`; raise ConfigError on any failure."""
    try:
        with move_when_done(target) as partial:
            yield partial
    except ConfigError:
        raise
    except Exception as error:
        message = f"{source}: cannot be converted to {precision}: {get_first_line(error)}"
        raise ConfigError(message, file=str(source)) from error


@contextmanager
def move_when_done(target: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder, and then move all files of this folder to the folder of `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        # The file name must be that of `target`, because a network refers to its weights file by name.
        yield Path(folder) / target.name
        # Move the network last: a version exists as soon as its model.onnx does.
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == target.name):
            shutil.move(file, target.parent / file.name)


def weight_files(file: Path) -> list[Path]:
    """Return the model's file and the separate files with its weights."""
    if file.suffix == ".xml":
        return [file, *(beside for beside in [file.with_suffix(".bin")] if beside.is_file())]
    found = [file, *(file.parent / name for name in sorted(data_files(read_network(file))))]
    if missing := next((each for each in found if not each.is_file()), None):
        raise ConfigError(
            f"{file}: its weights are in {missing.name}, which does not exist: put that file beside the model file",
            file=str(file),
        )
    return found


def find_weighted_nodes(file: Path) -> list[str]:
    """Return the name of the first output of each operation that would be faster with INT8 weights."""
    network = read_network(file).graph
    weights = {tensor.name for tensor in network.initializer}
    return [node.output[0] for node in network.node if has_weight_input(node, weights)]


def has_weight_input(node: Any, initializers: set[str]) -> bool:
    return node.op_type in WEIGHTED_OPS and any(name in initializers for name in node.input[:2])


def is_large(file: Path) -> bool:
    return sum(each.stat().st_size for each in weight_files(file)) > MOST_BYTES


@contextmanager
def silence_quantizer() -> Iterator[None]:
    """Hide ONNX Runtime's log messages that advise to infer shapes first; callers do so if it helps."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def _write_int8(source: Path, target: Path) -> None:
    """Convert weights to signed bytes with a scale per channel; activations are quantized while the model runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with silence_quantizer():
        quantize_dynamic(
            source,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            use_external_data_format=is_large(source),
        )


def _write_fp16(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    is_split = sum(each.stat().st_size for each in weight_files(source)) / 2 > MOST_BYTES
    found = convert_float_to_float16(onnx.load(source), keep_io_types=True, disable_shape_infer=is_large(source))
    onnx.save(found, target, save_as_external_data=is_split, location=f"{target.name}.data" if is_split else None)


_CONVERSIONS: dict[str, Callable[[Path, Path], None]] = {"int8": _write_int8, "fp16": _write_fp16}
