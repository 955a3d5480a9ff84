"""Makes small models: networks that convert quickly, and invalid models."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.servers import write_model

WIDTH = 32


def dense_graph(seed: int = 0) -> onnx.GraphProto:
    """Return a network of two layers: `x` FP32 [n, 32] → `y` FP32 [n, 16]."""
    rng = np.random.default_rng(seed)
    weights = {"w1": (WIDTH, 64), "b1": (64,), "w2": (64, 16), "b2": (16,)}
    return helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Gemm", ["r", "w2", "b2"], ["y"]),
        ],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [
            numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
            for name, shape in weights.items()
        ],
    )


def write_dense(repository: Path, name: str = "dense", settings: str = "", is_external: bool = False) -> Path:
    """Write a model with its weights in the file or, if `is_external`, beside it; return its folder."""
    write_model(repository, name, dense_graph(), settings)
    file = repository / name / "1" / "model.onnx"
    if is_external:
        model = onnx.load(file)
        file.unlink()
        onnx.save(model, file, save_as_external_data=True, location="weights.data", size_threshold=0)
    return repository / name


def write_folder(folder: Path) -> Path:
    """Write a model whose files no engine can load."""
    (folder / "1").mkdir(parents=True)
    (folder / "model.yaml").write_text("task: tensor\nresidence: {load: lazy, idle_unload_s: 7, max_waiting_s: 8}\n")
    (folder / "1" / "model.onnx").write_bytes(b"model")
    (folder / "1" / "weights.bin").write_bytes(b"w" * 100)
    return folder


def write_encoder(repository: Path, name: str, settings: str) -> None:
    """Write a model that answers like a text encoder at a thousandth of the work; the caller adds a tokenizer."""
    rng = np.random.default_rng(0)
    shapes = {"table": (30_522, 8), "dense": (8, 384)}
    numbers = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    numbers |= {"first": np.array([1], np.int64), "last": np.array([-1], np.int64)}
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["tokens"]),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["mask", "last"], ["weights"]),
            helper.make_node("Mul", ["tokens", "weights"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "first"], ["sum"], keepdims=0),
            helper.make_node("MatMul", ["sum", "dense"], ["vectors"]),
            helper.make_node("ReduceL2", ["vectors", "first"], ["length"]),
            helper.make_node("Div", ["vectors", "length"], ["sentence_embedding"]),
        ],
        "encoder",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["batch", 384])],
        [numpy_helper.from_array(values, name) for name, values in numbers.items()],
    )
    write_model(repository, name, graph)
    (repository / name / "model.yaml").write_text(settings)


def write_upscaler(repository: Path, name: str, settings: str) -> None:
    """Write a model for `upscale` of one small convolution."""
    kernel = np.zeros((1, 1, 3, 3), np.float32)
    kernel[0, 0, 1, 1] = 1
    shape: list[str | int] = ["batch", 1, "height", "width"]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "kernel"], ["y"], pads=[1, 1, 1, 1])],
        "upscaler",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(kernel, "kernel")],
    )
    write_model(repository, name, graph)
    (repository / name / "model.yaml").write_text(settings)
