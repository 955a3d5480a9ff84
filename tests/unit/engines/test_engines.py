"""Both engines on the same files: every datatype, and the refusals."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor
from penstock.core.tensors import NUMPY_TYPES
from penstock.engines.engine_protocols import Engine, EngineSpec
from penstock.engines.onnx import onnx_engine as engine_module
from penstock.engines.onnx.onnx_engine import OnnxEngine
from penstock.engines.openvino.openvino_engine import OpenVinoEngine

ENGINES = [OnnxEngine, OpenVinoEngine]
ONNX_TYPES = {
    "BOOL": T.BOOL,
    "UINT8": T.UINT8,
    "UINT16": T.UINT16,
    "UINT32": T.UINT32,
    "UINT64": T.UINT64,
    "INT8": T.INT8,
    "INT16": T.INT16,
    "INT32": T.INT32,
    "INT64": T.INT64,
    "FP16": T.FLOAT16,
    "FP32": T.FLOAT,
    "FP64": T.DOUBLE,
    "BF16": T.BFLOAT16,
    "BYTES": T.STRING,
}


def save(path: Path, nodes: list[onnx.NodeProto], datatype: int, width: int | str = 4) -> Path:
    inputs = [helper.make_tensor_value_info("x", datatype, ["batch", width])]
    outputs = [helper.make_tensor_value_info("y", datatype, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


def identity(folder: Path, datatype: str) -> Path:
    return save(folder / "model.onnx", [helper.make_node("Identity", ["x"], ["y"])], ONNX_TYPES[datatype])


def load(kind: type, file: Path, precision: str = "fp32", instances: int = 2) -> Engine:
    engine: Engine = kind(EngineSpec(file, precision, 1, instances))
    return engine


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("datatype", sorted(NUMPY_TYPES))
def test_the_identity_network_returns_every_datatype(tmp_path: Path, kind: type, datatype: str) -> None:
    engine = load(kind, identity(tmp_path, datatype))
    signature = engine.load()
    assert (signature.inputs[0].datatype, signature.inputs[0].shape) == (datatype, (-1, 4))
    array = np.arange(8).reshape(2, 4).astype(NUMPY_TYPES[datatype])
    read_only = np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)  # like a tensor received from the wire
    for instance in (0, 1):
        (found,) = engine.infer(instance, {"x": read_only}, ["y"])
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    engine.close()


def test_onnx_runtime_accepts_texts(tmp_path: Path) -> None:
    engine = load(OnnxEngine, identity(tmp_path, "BYTES"))
    engine.load()
    array = np.array([["é".encode(), b"b", b"", b"d"]], dtype=object)
    (found,) = engine.infer(0, {"x": array}, [])
    assert found.tolist() == [["é", "b", "", "d"]]
    with pytest.raises(InvalidTensor, match="UTF-8"):
        engine.infer(0, {"x": np.array([[b"\xff", b"", b"", b""]], dtype=object)}, [])


def test_openvino_refuses_texts_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine: onnx"):
        load(OpenVinoEngine, identity(tmp_path, "BYTES")).load()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_result_survives_the_next_run(tmp_path: Path, kind: type) -> None:
    engine = load(kind, identity(tmp_path, "FP32"), instances=1)
    engine.load()
    (first,) = engine.infer(0, {"x": np.ones((1, 4), np.float32)}, [])
    engine.infer(0, {"x": np.zeros((1, 4), np.float32)}, [])
    assert first.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_broken_file_is_reported(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=str(file)):
        load(kind, file).load()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_model_that_fails_on_an_input_reports_the_reason(tmp_path: Path, kind: type) -> None:
    shape = helper.make_node("Constant", [], ["s"], value=helper.make_tensor("s", T.INT64, [2], [3, 5]))
    file = save(tmp_path / "model.onnx", [shape, helper.make_node("Reshape", ["x", "s"], ["y"])], T.FLOAT, "width")
    engine = load(kind, file)
    engine.load()
    with pytest.raises((EngineFailed, InvalidTensor)):
        engine.infer(0, {"x": np.ones((1, 4), np.float32)}, [])
    (found,) = engine.infer(0, {"x": np.ones((1, 15), np.float32)}, [])
    assert found.shape == (3, 5)


def test_auto_means_bf16_on_processors_that_support_it(tmp_path: Path) -> None:
    import openvino as ov

    has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    signature = load(OpenVinoEngine, identity(tmp_path, "FP32"), "auto").load()
    assert signature.precision == ("bf16" if has_bf16 else "fp32")
    assert load(OpenVinoEngine, identity(tmp_path, "FP32"), "fp32").load().precision == "fp32"


@pytest.mark.parametrize(
    ("sizes", "instances", "own_bytes", "sessions", "has_arena"),
    [
        ((4,), 2, 10_000, 2, True),
        ((4,), 2, 10, 1, False),
        ((4,), 1, 10, 1, True),
        ((1, 8, 8), 2, 10_000, 1, True),
    ],
)
def test_threads_do_not_share_memory_for_computing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    instances: int,
    own_bytes: int,
    sessions: int,
    has_arena: bool,
) -> None:
    monkeypatch.setattr(engine_module, "MAX_COPIED_BYTES", own_bytes)
    value = helper.make_tensor_value_info("x", T.FLOAT, ["batch", *sizes])
    answer = helper.make_tensor_value_info("y", T.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [answer])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    engine = OnnxEngine(EngineSpec(tmp_path / "model.onnx", "auto", 1, instances))
    engine.load()
    assert len(engine._sessions) == sessions
    assert all(session.get_session_options().enable_cpu_mem_arena is has_arena for session in engine._sessions)
    x = np.ones((2, *sizes), np.float32)
    assert all((engine.infer(number, {"x": x}, [])[0] == x).all() for number in range(instances + 1))
