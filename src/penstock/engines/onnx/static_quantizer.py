"""Quantizes ONNX files to INT8 with ranges that are measured on calibration data, for CPUs or for TensorRT."""

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.tensors import Array
from penstock.engines.onnx.onnx_network import read_network
from penstock.engines.onnx.onnx_variants import converting_to, has_weight_input, is_large, silence_quantizer

METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}  # as ONNX Runtime names them
TEXT_OPS = ["MatMul", "Gemm", "Gather"]  # for networks without convolutions: all other operations stay in floats
GPU_OPS = ["MatMul", "Gemm", "Conv"]  # TensorRT fuses the operations between these
LEVELS = 255  # of a byte, besides zero
TRIED_SAMPLES = 12  # number of samples on which nodes are compared


class StaticQuantizer:
    """Quantizes one ONNX file; keeps the measured ranges in `folder`, so that later calls of `write` are cheap."""

    def __init__(
        self, source: Path, calibration: Sequence[Mapping[str, Array]], folder: Path, *, is_for_gpu: bool = False
    ) -> None:
        """`is_for_gpu`: write files for TensorRT, which supports only signed bytes around zero and biases in floats."""
        self._source = source
        self._is_for_gpu = is_for_gpu
        self._calibration = calibration
        self._folder = folder
        self._prepared = self._preprocess()
        network = read_network(self._prepared).graph
        weights = {tensor.name for tensor in network.initializer}
        products = [node for node in network.node if node.op_type in TEXT_OPS[:2]]
        # Products of two activations are excluded, because INT8 makes them less accurate but not faster. In a network
        # of convolutions, all layers are quantized.
        has_convolutions = any(node.op_type == "Conv" for node in network.node)
        ops = GPU_OPS if is_for_gpu else TEXT_OPS
        self._ops = None if has_convolutions and not is_for_gpu else ops
        self._unweighted = [node.name for node in products if not has_weight_input(node, weights)] if self._ops else []

    def write(self, target: Path, method: str, excluded: Sequence[str] = ()) -> None:
        """Write the network with QuantizeLinear and DequantizeLinear nodes; `excluded` nodes stay in floating point."""
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        with (
            converting_to(self._source, target, "int8") as partial,
            silence_quantizer(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            quantize_static(
                self._prepared,
                partial,
                _make_reader(self._calibration),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=self._ops,
                per_channel=True,
                activation_type=QuantType.QInt8 if self._is_for_gpu else QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=[*self._unweighted, *excluded],
                calibrate_method=getattr(CalibrationMethod, METHODS[method]),
                calibration_cache_path=self._folder / f"ranges-{method}.json",
                use_external_data_format=is_large(self._source),
                extra_options={
                    # One sample at a time, because texts have different lengths, and all activations of a step are
                    # kept.
                    "CalibStridedMinMax": 1,
                    # The outputs of products stay in floats, because rounding them would reduce the accuracy most.
                    "OpTypesToExcludeOutputQuantization": self._ops or [],
                    **({"ActivationSymmetric": True, "QuantizeBias": False} if self._is_for_gpu else {}),
                },
            )

    def rank_by_sensitivity(self) -> list[str]:
        """Return the nodes with weights, those first whose quantized input changes the network's output most.

        One network with a switch per node is used for all nodes: a switch quantizes the input of its node.
        """
        import onnx

        model = onnx.load(self._prepared)
        weights = {tensor.name for tensor in model.graph.initializer}
        inputs = {node.name: node.input[0] for node in model.graph.node if has_weight_input(node, weights)}
        given = {value.name for value in model.graph.input} | weights
        watched = sorted(set(inputs.values()) - given)
        answers = [value.name for value in model.graph.output]
        samples = self._calibration[:: -(-len(self._calibration) // TRIED_SAMPLES)]
        ranges = self._measure_ranges(onnx.load(self._prepared), watched, samples)
        session = self._open_session(add_switches(model, ranges))
        expected = [_run_network(session, sample, ranges, answers) for sample in samples]
        lost = {}
        for name in ranges:
            found = [_run_network(session, sample, ranges, answers, switched_on=name) for sample in samples]
            lost[name] = float(
                np.mean([_relative_error(one, other) for one, other in zip(expected, found, strict=True)])
            )
        return sorted(inputs, key=lambda node: -lost.get(inputs[node], 0.0))

    def _measure_ranges(
        self, model: Any, watched: Sequence[str], samples: Sequence[Mapping[str, Array]]
    ) -> dict[str, tuple[float, float]]:
        import onnx

        given = {value.name for value in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in watched if name not in given)
        session = self._open_session(model)
        found: dict[str, tuple[float, float]] = {}
        for sample in samples:
            for name, array in zip(watched, session.run(watched, dict(sample)), strict=True):
                if array.dtype == np.float32 and array.size:
                    low, high = found.get(name, (0.0, 0.0))
                    found[name] = min(low, float(array.min())), max(high, float(array.max()))
        return {name: (low, high) for name, (low, high) in found.items() if high > low}

    def _open_session(self, model: Any) -> Any:
        import onnx
        import onnxruntime

        file = self._folder / "tried.onnx"
        onnx.save(model, file, save_as_external_data=is_large(self._source), location="tried.data")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def _preprocess(self) -> Path:
        """Return a copy of the file with inferred shapes and folded constants, or the file itself if that fails."""
        from onnxruntime.quantization.shape_inference import quant_pre_process

        target = self._folder / "prepared.onnx"
        if is_large(self._source):
            return self._source
        with silence_quantizer(), contextlib.redirect_stdout(io.StringIO()):
            try:
                quant_pre_process(self._source, target, skip_symbolic_shape=True)
            except Exception:  # noqa: BLE001 - this step is optional
                return self._source
        _name_nodes(target)
        return target


def _name_nodes(file: Path) -> None:
    """Name all nodes, because the quantizer excludes nodes by name, and some exporters do not name them."""
    import onnx

    model = onnx.load(file)
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}#{number}"
    onnx.save(model, file)


def add_switches(model: Any, ranges: Mapping[str, tuple[float, float]]) -> Any:
    """Add an input `switch:<tensor>` per range, which selects whether nodes with weights read the tensor quantized."""
    from onnx import TensorProto, helper

    weights = {tensor.name for tensor in model.graph.initializer}
    nodes: list[Any] = []
    done: set[str] = set()
    for node in model.graph.node:
        name = node.input[0] if node.input else ""
        if has_weight_input(node, weights) and name in ranges:
            if name not in done:
                nodes += _make_switch(name, *ranges[name])
                done.add(name)
            node.input[0] = f"switched:{name}"
        nodes.append(node)
    kept = [helper.make_tensor_value_info(f"switch:{name}", TensorProto.BOOL, []) for name in ranges]
    model.graph.input.extend(kept)
    copied = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copied)
    return model


def _make_switch(name: str, low: float, high: float) -> list[Any]:
    from onnx import helper, numpy_helper

    step = (high - low) / LEVELS
    constants = {"step": np.float32(step), "zero": np.uint8(np.clip(round(-low / step), 0, LEVELS))}
    step_name, zero_name, bytes_name, floats_name = (f"{part}:{name}" for part in ("step", "zero", "bytes", "floats"))
    return [
        *(
            helper.make_node("Constant", [], [f"{part}:{name}"], value=numpy_helper.from_array(np.asarray(value)))
            for part, value in constants.items()
        ),
        helper.make_node("QuantizeLinear", [name, step_name, zero_name], [bytes_name]),
        helper.make_node("DequantizeLinear", [bytes_name, step_name, zero_name], [floats_name]),
        helper.make_node("Where", [f"switch:{name}", floats_name, name], [f"switched:{name}"]),
    ]


def _run_network(
    session: Any, sample: Mapping[str, Array], switches: Iterable[str], outputs: Sequence[str], switched_on: str = ""
) -> Array:
    inputs = {**sample, **{f"switch:{name}": np.array(name == switched_on) for name in switches}}
    found = [array.ravel() for array in session.run(outputs, inputs) if array.dtype.kind == "f"]
    return np.concatenate(found).astype(np.float64)


def _relative_error(expected: Array, actual: Array) -> float:
    return float(np.linalg.norm(expected - actual) / max(float(np.linalg.norm(expected)), 1e-12))


def _make_reader(samples: Sequence[Mapping[str, Array]]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left: Iterator[Mapping[str, Array]] = iter(())

        def __len__(self) -> int:
            return len(samples)

        def set_range(self, start_index: int, end_index: int) -> None:
            self._left = iter(samples[start_index:end_index])

        def get_next(self) -> Mapping[str, Array] | None:
            return next(self._left, None)

    return Reader()
