"""Loading a version: its description, its memory, and whether it may run on the event loop."""

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.models.loading import has_steady_cost, load_block
from tests.servers import write_identity, write_model


def save(path: Path, *op_types: str) -> Path:
    branch = helper.make_graph([], "b", [], [])
    bodies: dict[str, dict[str, Any]] = {"Loop": {"body": branch}}
    nodes = [helper.make_node(kind, ["x"], ["y"], **bodies.get(kind, {})) for kind in op_types]
    value = helper.make_tensor_value_info("x", T.FLOAT, [1])
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [value], [value])), path)
    return path


@pytest.mark.parametrize(
    ("ops", "steady"), [(["Identity", "MatMul"], True), (["Identity", "Loop"], False), (["If"], False)]
)
def test_loops_and_branches_are_found(tmp_path: Path, ops: list[str], steady: bool) -> None:
    assert has_steady_cost(save(tmp_path / "m.onnx", *ops)) is steady


def test_the_shipped_upscaler_has_constant_cost() -> None:
    assert has_steady_cost(Path(__file__).parents[3] / "models" / "srcnn" / "1" / "model.onnx")


def test_second_network_is_loaded_and_must_exist(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[3] / "models" / "srcnn", tmp_path / "srcnn")
    with load_block("blk-m", tmp_path / "srcnn", "1", Limits()) as block:
        assert [spec.name for spec in block.signature.inputs] == ["luminance", "second.plane"]
    (tmp_path / "srcnn" / "1" / "denoise.onnx").unlink()
    with pytest.raises(ConfigError, match=r"upscale\.denoise: .*denoise\.onnx does not exist"):
        load_block("blk-m", tmp_path / "srcnn", "1", Limits())


def test_loaded_block_has_a_fingerprint_and_a_size(tmp_path: Path) -> None:
    write_identity(tmp_path, "m", "FP32", "instances: {count: 1}\n")
    first = load_block("blk-m", tmp_path / "m", "1", Limits())
    assert first.description.is_described
    assert first.description.fingerprint
    assert first.has_steady_cost
    with (tmp_path / "m" / "1" / "weights.bin").open("wb") as file:
        file.truncate(32 * 1024 * 1024)
    second = load_block("blk-m", tmp_path / "m", "1", Limits())
    assert second.description.fingerprint != first.description.fingerprint
    assert second.size_bytes >= 32 * 1024 * 1024 > first.size_bytes, "the size is at least that of the files"


def test_a_models_memory_size_includes_its_weights(tmp_path: Path) -> None:
    """The file has a few bytes, but the loaded model has 64 MB."""
    graph = helper.make_graph(
        [
            helper.make_node("RandomUniform", [], ["weights"], shape=[4096, 4096], seed=1.0),
            helper.make_node("ReduceMax", ["weights"], ["most"], keepdims=0),
            helper.make_node("Add", ["x", "most"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", T.FLOAT, ["n", 1])],
        [helper.make_tensor_value_info("y", T.FLOAT, ["n", 1])],
    )
    write_model(tmp_path, "m", graph, "instances: {count: 1}\n")
    assert load_block("blk-m", tmp_path / "m", "1", Limits()).size_bytes > 32 * 1024 * 1024


def test_load_error_is_explained(tmp_path: Path) -> None:
    write_identity(tmp_path, "m", "FP32")
    with pytest.raises(ConfigError, match="there is no version 7"):
        load_block("blk-m", tmp_path / "m", "7", Limits())
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"model\.onnx"):
        load_block("blk-m", tmp_path / "m", "1", Limits())


def test_a_python_models_memory_size_includes_its_processes(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "model.yaml").write_text(
        "engine: python\ninstances: {count: 1}\npython:\n"
        "  inputs: [{name: x, datatype: FP32, shape: [-1]}]\n"
        "  outputs: [{name: y, datatype: FP32, shape: [-1]}]\n"
    )
    (folder / "1" / "model.py").write_text(
        "class Model:\n"
        "    def __init__(self, context):\n"
        "        self.weights = bytearray(range(256)) * (48 * 4096)  # 48 MB\n"
        "    def infer(self, inputs, context):\n"
        "        return {'y': inputs['x']}\n"
    )
    loaded = load_block("blk-m", folder, "1", Limits())
    loaded.engine.close()
    assert loaded.size_bytes > 48 * 1024 * 1024
    assert loaded.description.is_described
    assert not loaded.has_steady_cost, "the time of a model's own code is unknown"
