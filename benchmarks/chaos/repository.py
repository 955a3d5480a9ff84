"""The model repositories that scenarios serve: a model that echoes, and the shipped ones with other settings."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper

ECHO = "echo"
ECHO_FLOATS = 256
LOOSE = "loose"
_WIDTH = 1024
LIGHT = 8  # layers: about 2 ms on one core, so that a kill always hits requests that run
HEAVY = 200  # so that a few dozen callers fill the workers


def add_echo(repository: Path, layers: int = LIGHT, **settings: Any) -> None:
    """`x` FP32 [n, 256] comes back as `y`, after some work whose result is `work`."""
    version = repository / ECHO / "1"
    version.mkdir(parents=True)
    (repository / ECHO / "model.yaml").write_text(
        yaml.safe_dump({"task": "tensor", "engine": "onnx", "batching": {"max_rows": 8}, **settings})
    )
    onnx.save(_echo_graph(layers), version / "model.onnx")


def add_loose(repository: Path) -> None:
    """Gives back what it takes, of any size: `n` INT64 and `s` BYTES, both [rows, columns]."""
    version = repository / LOOSE / "1"
    version.mkdir(parents=True)
    (repository / LOOSE / "model.yaml").write_text(yaml.safe_dump({"task": "tensor", "engine": "onnx"}))
    kinds = {"n": TensorProto.INT64, "s": TensorProto.STRING}
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in kinds],
        LOOSE,
        [helper.make_tensor_value_info(name, kind, ["rows", f"{name}_columns"]) for name, kind in kinds.items()],
        [
            helper.make_tensor_value_info(f"{name}_out", kind, ["rows", f"{name}_columns"])
            for name, kind in kinds.items()
        ],
    )
    onnx.save(_model(graph), version / "model.onnx")


def add_shipped(repository: Path, models: Path, name: str, **batching: Any) -> None:
    """A model of the default repository, with other settings of its batching."""
    source = (models / name).resolve()
    target = repository / name
    target.mkdir(parents=True)
    settings = yaml.safe_load((source / "model.yaml").read_text())
    settings["batching"] = {**settings.get("batching", {}), **batching}
    (target / "model.yaml").write_text(yaml.safe_dump(settings))
    for version in source.iterdir():
        if version.name.isdecimal():
            (target / version.name).symlink_to(version, target_is_directory=True)


def _echo_graph(layers: int) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    up = rng.standard_normal((ECHO_FLOATS, _WIDTH), dtype=np.float32) / 16
    mix = rng.standard_normal((_WIDTH, _WIDTH), dtype=np.float32) / 32
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("MatMul", ["x", "up"], ["h0"])]
    for layer in range(layers):
        nodes.append(helper.make_node("Tanh", [f"h{layer}"], [f"t{layer}"]))
        nodes.append(helper.make_node("MatMul", [f"t{layer}", "mix"], [f"h{layer + 1}"]))
    nodes.append(helper.make_node("ReduceSum", [f"h{layers}", "axes"], ["work"], keepdims=1))
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        ECHO,
        [helper.make_tensor_value_info("x", floats, ["n", ECHO_FLOATS])],
        [
            helper.make_tensor_value_info("y", floats, ["n", ECHO_FLOATS]),
            helper.make_tensor_value_info("work", floats, ["n", 1]),
        ],
        [
            numpy_helper.from_array(up, "up"),
            numpy_helper.from_array(mix, "mix"),
            numpy_helper.from_array(np.array([1], dtype=np.int64), "axes"),
        ],
    )
    return _model(graph)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
