"""Makes small models for real servers, and requests to these models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from penstock.pb.inference import grpc_service_pb2 as pb
from tests.chaos.repository import make_slow_network

ROOT = Path(__file__).parent.parent
# A command that runs the server as the first process of a namespace, as in a container.
PROCESS_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL")

IDENTITY_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}


def floats(model: str, *numbers: float, rows: int = 1, version: str = "", request_id: str = "") -> pb.ModelInferRequest:
    """Return a request with `x` FP32 [rows, len(numbers)]."""
    array = np.tile(np.array(numbers, np.float32), (rows, 1))
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=array.shape)
    message.raw_input_contents.append(array.tobytes())
    return message


def floats_json(*numbers: float, rows: int = 1) -> dict[str, Any]:
    """Return the body of a REST request with `x` FP32 [rows, len(numbers)]."""
    shape = [rows, len(numbers)]
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": [*numbers] * rows}]}


def log_lines(log: Path) -> list[dict[str, Any]]:
    """Return the structured events in a server's log, without other output."""
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def answered(response: pb.ModelInferResponse) -> list[float]:
    """Return the numbers in the output `y`."""
    (raw,) = response.raw_output_contents
    return list(np.frombuffer(raw, np.float32).tolist())


def write_identity(repository: Path, name: str, datatype: str, settings: str = "") -> None:
    """Write a model `x` → `y` of any size [n, m] that returns its input."""
    kind = IDENTITY_TYPES[datatype]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [helper.make_tensor_value_info("x", kind, ["n", "m"])],
        [helper.make_tensor_value_info("y", kind, ["n", "m"])],
    )
    write_model(repository, name, graph, settings)


def write_add_sub(repository: Path, name: str, settings: str = "") -> None:
    """Write a model with two inputs and two outputs: `sum` and `difference` of `a` and `b`, INT32 [n, 4]."""
    shape: list[str | int | None] = ["n", 4]
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        "add_sub",
        [helper.make_tensor_value_info(each, TensorProto.INT32, shape) for each in ("a", "b")],
        [helper.make_tensor_value_info(each, TensorProto.INT32, shape) for each in ("sum", "difference")],
    )
    write_model(repository, name, graph, settings)


def write_factor(repository: Path, name: str, factor: float, settings: str = "", version: int = 1) -> None:
    """Write a model `x` → `y` that multiplies, so that answers show which file was loaded."""
    shape = ["n", "m"]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        "factor",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])],
    )
    write_model(repository, name, graph, f"instances: {{count: 1}}\n{settings}", version)


def write_slow(repository: Path, name: str, settings: str = "") -> None:
    """Write a model `x` → `y`, FP32 [n, m], that returns its input after as many rounds of work as its largest number.

    A round takes about half a millisecond.
    """
    write_model(repository, name, make_slow_network(), settings)


def write_model(repository: Path, name: str, graph: onnx.GraphProto, settings: str = "", version: int = 1) -> None:
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    (folder.parent / "model.yaml").write_text(f"task: tensor\n{settings}")
