"""Other precisions of an ONNX file: INT8 weights for CPUs, FP16 for GPUs."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import ConfigError

RECIPE = 1  # counts up when a conversion below changes, so that files made by an older one are not taken


def convert(source: Path, target: Path, precision: str) -> None:
    """Writes `target` whole or not at all. Inputs and outputs keep their types."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _CONVERSIONS[precision](source, partial)
        partial.replace(target)
    except ConfigError:
        raise
    except Exception as error:  # both converters raise whatever their graph walk meets
        raise ConfigError(f"{source}: cannot be converted to {precision}: {error}", file=str(source)) from error
    finally:
        partial.unlink(missing_ok=True)


def _to_int8(source: Path, target: Path) -> None:
    """Weights to signed bytes with a scale for each channel, activations as they come: needs no calibration."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(source, target, weight_type=QuantType.QInt8, per_channel=True)


def _to_fp16(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer advises on the root logger to infer shapes first, which these graphs do not need."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


_CONVERSIONS: dict[str, Callable[[Path, Path], None]] = {"int8": _to_int8, "fp16": _to_fp16}
