"""From folders to blocks: what they tell, what they take, and which may run on the loop."""

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


def test_the_shipped_upscaler_is_steady() -> None:
    assert has_steady_cost(Path(__file__).parents[3] / "models" / "srcnn" / "1" / "model.onnx")


def test_a_second_network_is_loaded_beside_the_first_and_missed(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[3] / "models" / "srcnn", tmp_path / "srcnn")
    with load_block("blk-m", tmp_path / "srcnn", "1", Limits()) as block:
        assert [spec.name for spec in block.signature.inputs] == ["luminance", "second.plane"]
    (tmp_path / "srcnn" / "1" / "denoise.onnx").unlink()
    with pytest.raises(ConfigError, match=r"upscale\.denoise: there is no .*denoise\.onnx; put it there"):
        load_block("blk-m", tmp_path / "srcnn", "1", Limits())


def test_a_loaded_block_tells_its_files_and_its_size(tmp_path: Path) -> None:
    write_identity(tmp_path, "m", "FP32", "instances: {count: 1}\n")
    first = load_block("blk-m", tmp_path / "m", "1", Limits())
    assert first.description.is_described
    assert first.description.fingerprint
    assert first.has_steady_cost
    with (tmp_path / "m" / "1" / "weights.bin").open("wb") as file:
        file.truncate(32 * 1024 * 1024)
    second = load_block("blk-m", tmp_path / "m", "1", Limits())
    assert second.description.fingerprint != first.description.fingerprint
    assert second.size_bytes >= 32 * 1024 * 1024 > first.size_bytes, "at least what the files have"


def test_a_model_takes_what_its_weights_take(tmp_path: Path) -> None:
    """The file holds a few numbers, the model that it describes 64 MB."""
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


def test_what_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    write_identity(tmp_path, "m", "FP32")
    with pytest.raises(ConfigError, match="there is no version 7"):
        load_block("blk-m", tmp_path / "m", "7", Limits())
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"model\.onnx"):
        load_block("blk-m", tmp_path / "m", "1", Limits())


def test_a_python_model_takes_what_its_processes_take(tmp_path: Path) -> None:
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
    assert not loaded.has_steady_cost, "its own code may do anything"
