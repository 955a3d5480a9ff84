"""The device and the precision that a file runs in: the choice, refusals, and what is reported."""

import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from penstock.core.errors import ConfigError
from penstock.core.tensors import Array
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.onnx import onnx_engine
from penstock.engines.onnx.onnx_engine import CPU, PROVIDERS, OnnxEngine

WIDTH = 64
HAS_CUDA = PROVIDERS["cuda"] in ort.get_available_providers() and Path("/dev/nvidiactl").exists()
HAS_COREML = PROVIDERS["mps"] in ort.get_available_providers()
X: Array = np.random.default_rng(1).standard_normal((8, WIDTH)).astype(np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of two layers in FP32."""
    rng = np.random.default_rng(7)
    weights = [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(2)]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, T.FLOAT, ["batch", WIDTH]) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(array, f"w{index}") for index, array in enumerate(weights)]
    return save(tmp_path / "fp32.onnx", helper.make_graph(nodes, "g", values[:1], values[1:], tensors))


@pytest.fixture
def fp16(file: Path) -> Path:
    target = file.with_name("fp16.onnx")
    onnx.save(convert_float_to_float16(onnx.load(file), keep_io_types=True), target)
    return target


@pytest.fixture
def int8(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)  # the quantizer logs advice here
    target = file.with_name("int8.onnx")
    quantize_dynamic(file, target, weight_type=QuantType.QInt8)
    return target


def save(path: Path, graph: onnx.GraphProto) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


def on(device: str, file: Path, threads: int = 1) -> OnnxEngine:
    return OnnxEngine(EngineSpec(file, "auto", threads, 2, device))


def answer(file: Path, device: str = "cpu") -> Array:
    engine = on(device, file)
    engine.load()
    return engine.infer(0, {"x": X}, ["y"])[0]


def least_cosine(found: Array, expected: Array) -> float:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / norms).min())


def providers(engine: OnnxEngine) -> list[list[str]]:
    return [session.get_providers() for session in engine._sessions]


# --- devices


def test_the_cpu_is_used_unless_another_device_is_configured(file: Path) -> None:
    engine = OnnxEngine(EngineSpec(file, "auto", 1, 2))
    assert engine.load().device == "cpu"
    assert providers(engine) == [[CPU], [CPU]]


def test_instances_of_several_threads_have_their_own_sessions(file: Path) -> None:
    engine = on("cpu", file, threads=2)
    engine.load()
    assert providers(engine) == [[CPU], [CPU]]


@pytest.mark.skipif(HAS_CUDA or HAS_COREML, reason="has a GPU")
def test_auto_means_the_cpu_on_a_machine_without_a_gpu(file: Path) -> None:
    assert on("auto", file).load().device == "cpu"


@pytest.mark.skipif(HAS_CUDA, reason="has an NVIDIA GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_missing_cuda_is_an_error_that_names_the_package(file: Path, device: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"instances\.device {device}: .*pip install 'penstock-serve\[cuda\]'; pip install .*onnxruntime-gpu",
    ):
        on(device, file).load()


@pytest.mark.skipif(HAS_COREML, reason="has CoreML")
def test_a_missing_coreml_is_an_error_that_names_the_requirements(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"instances\.device mps: .*macOS"):
        on("mps", file).load()


def test_a_device_that_supports_no_operation_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a provider of every ONNX Runtime for Linux that supports none of these operations."""
    idle = "AzureExecutionProvider"
    if idle not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has no idle provider")
    monkeypatch.setitem(PROVIDERS, "mps", idle)
    monkeypatch.setattr(onnx_engine, "_provider_options", lambda kind, index: {})
    with pytest.raises(ConfigError, match="mps can run none of its operations"):
        on("mps", file).load()


def test_auto_falls_back_to_the_cpu_if_a_device_fails(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = "AzureExecutionProvider"
    if idle not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has no idle provider")
    monkeypatch.setitem(PROVIDERS, "mps", idle)
    monkeypatch.setattr(onnx_engine, "_provider_options", lambda kind, index: {})
    engine = on("auto", file)
    assert engine.load().device == "cpu"
    assert providers(engine) == [[CPU], [CPU]]


@pytest.mark.skipif(not HAS_CUDA, reason="needs an NVIDIA GPU")
def test_cuda_results_equal_those_of_the_cpu(file: Path, fp16: Path) -> None:
    for device in ("cuda", "cuda:0", "auto"):
        engine = on(device, fp16)
        signature = engine.load()
        assert (signature.precision, signature.device) == ("fp16", "cuda" if device == "auto" else device)
        assert providers(engine) == [[PROVIDERS["cuda"], CPU]]
    assert least_cosine(answer(fp16, "cuda"), answer(file)) > 0.9999
    assert np.allclose(answer(file, "cuda"), answer(file), atol=1e-5)
    with pytest.raises(ConfigError, match="device ID"):
        on("cuda:99", file).load()


# --- precision


def test_an_fp16_file_is_recognized_and_answers_like_its_fp32(file: Path, fp16: Path) -> None:
    assert on("cpu", file).load().precision == "fp32"
    assert on("cpu", fp16).load().precision == "fp16"
    expected, found = answer(file), answer(fp16)
    assert found.dtype == np.float32
    assert least_cosine(found, expected) > 0.9999
    assert not np.array_equal(found, expected)


def test_an_int8_file_is_recognized(file: Path, int8: Path) -> None:
    assert on("cpu", int8).load().precision == "int8"
    assert least_cosine(answer(int8), answer(file)) > 0.99


def test_the_precision_is_that_of_most_weights(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, T.FLOAT16, ["batch", WIDTH]) for name in ("x", "y")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Cast", ["c"], ["d"], to=T.FLOAT16),
        helper.make_node("Mul", ["a", "d"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones(1, np.float32), "c"),
        numpy_helper.from_array(np.ones((WIDTH, WIDTH), np.float16), "w"),
    ]
    path = save(tmp_path / "m.onnx", helper.make_graph(nodes, "g", values[:1], values[1:], weights))
    assert on("cpu", path).load().precision == "fp16"


def test_weights_in_a_separate_file_count(fp16: Path) -> None:
    beside = fp16.with_name("beside.onnx")
    onnx.save(onnx.load(fp16), beside, save_as_external_data=True, location="weights", size_threshold=0)
    assert beside.stat().st_size < 2 * WIDTH * WIDTH
    assert on("cpu", beside).load().precision == "fp16"


@pytest.mark.parametrize(("datatype", "precision"), [(T.FLOAT16, "fp16"), (T.DOUBLE, "fp64"), (T.INT64, "fp32")])
def test_a_file_without_weights_has_the_precision_of_its_inputs(tmp_path: Path, datatype: int, precision: str) -> None:
    values = [helper.make_tensor_value_info(name, datatype, ["batch", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", values[:1], values[1:])
    assert on("cpu", save(tmp_path / "m.onnx", graph)).load().precision == precision


def test_ort_files_are_served_and_treated_as_fp32(file: Path) -> None:
    target = file.with_name("model.ort")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(str(file), options, providers=[CPU])
    assert on("cpu", target).load().precision == "fp32"
    assert np.allclose(answer(target), answer(file), atol=1e-6)


def test_openvino_reports_the_precision_that_runs_instead_of_the_files(fp16: Path) -> None:
    from penstock.engines.openvino.openvino_engine import (
        OpenVinoEngine,  # not at the top: a GPU's machine may not have the package
    )

    assert OpenVinoEngine(EngineSpec(fp16, "fp32", 1, 1)).load().precision == "fp32"
