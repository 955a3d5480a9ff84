"""Writes the models that scenarios serve: models that return their input, and shipped models with other settings."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.repository import link_model, write_network

ECHO = "echo"
ECHO_FLOATS = 256
ANY_SIZE_MODEL = "loose"
WIDTH = 1024
LIGHT = 8  # layers: about 2 ms on one core, so that a kill always hits requests that run
HEAVY = 200  # so that a few dozen callers fill the workers


def add_echo(repository: Path, layers: int = LIGHT, name: str = ECHO, **settings: Any) -> None:
    """Add a model that returns `x` FP32 [n, 256] as `y`; `layers` determines how long it computes."""
    given = {"task": "tensor", "engine": "onnx", "batching": {"max_rows": 8}, **settings}
    answer = helper.make_node("Identity", ["x"], ["y"])
    write_network(repository / name, make_working_network(ECHO, ECHO_FLOATS, WIDTH, layers, answer), **given)


def add_any_size_model(repository: Path) -> None:
    """Add a model that returns its inputs of any size: `n` INT64 and `s` BYTES, both [rows, columns]."""
    kinds = {"n": TensorProto.INT64, "s": TensorProto.STRING}
    inputs, outputs = (
        [helper.make_tensor_value_info(name + end, kind, ["rows", f"{name}_columns"]) for name, kind in kinds.items()]
        for end in ("", "_out")
    )
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in kinds]
    graph = helper.make_graph(nodes, ANY_SIZE_MODEL, inputs, outputs)
    write_network(repository / ANY_SIZE_MODEL, graph, task="tensor", engine="onnx")


def add_shipped(repository: Path, models: Path, name: str, **batching: Any) -> None:
    """Add a model of the default repository with changed batching settings."""
    link_model(models / name, repository / name, batching=batching)


def make_working_network(
    name: str, floats: int, width: int, layers: int, answer: onnx.NodeProto, *further: onnx.TensorProto
) -> onnx.GraphProto:
    """Return a network in which the node `answer` makes `y` of `x` FP32 [n, floats], beside some work."""
    rng = np.random.default_rng(0)
    up = rng.standard_normal((floats, width), dtype=np.float32) / 16
    mix = rng.standard_normal((width, width), dtype=np.float32) / 32
    nodes = [answer, helper.make_node("MatMul", ["x", "up"], ["h0"])]
    for layer in range(layers):
        nodes.append(helper.make_node("Tanh", [f"h{layer}"], [f"t{layer}"]))
        nodes.append(helper.make_node("MatMul", [f"t{layer}", "mix"], [f"h{layer + 1}"]))
    nodes.append(helper.make_node("ReduceSum", [f"h{layers}", "axes"], ["work"], keepdims=1))
    weights = {"up": up, "mix": mix, "axes": np.array([1], dtype=np.int64)}
    return helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", floats])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", floats]),
            helper.make_tensor_value_info("work", TensorProto.FLOAT, ["n", 1]),
        ],
        [*further, *(numpy_helper.from_array(array, each) for each, array in weights.items())],
    )


def make_slow_network() -> onnx.GraphProto:
    """Return a network that returns `x` FP32 [n, m] as `y` after as many rounds of work as its largest number.

    A round takes half a millisecond.
    """
    size = 256
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["before", "weights"], ["after"]),
            helper.make_node("Identity", ["go_on"], ["goes_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, [size, size]),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.FLOAT, [size, size]),
        ],
    )
    weights = numpy_helper.from_array(np.full((size, size), 1 / size, np.float32), "weights")
    return helper.make_graph(
        [
            helper.make_node("ReduceMax", ["x"], ["longest"], keepdims=0),
            helper.make_node("Cast", ["longest"], ["rounds"], to=TensorProto.INT64),
            helper.make_node("Loop", ["rounds", "", "weights"], ["last"], body=body),
            helper.make_node("ReduceMin", ["last"], ["least"], keepdims=0),
            helper.make_node("Sub", ["least", "least"], ["nothing"]),
            helper.make_node("Add", ["x", "nothing"], ["y"]),
        ],
        "slow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m"])],
        [weights],
    )
