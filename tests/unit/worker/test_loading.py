"""Which models may run on the loop."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from penstock.worker.loading import has_steady_cost


def save(path: Path, *op_types: str) -> Path:
    branch = helper.make_graph([], "b", [], [])
    nodes = [helper.make_node(kind, ["x"], ["y"], **({"body": branch} if kind == "Loop" else {})) for kind in op_types]
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
