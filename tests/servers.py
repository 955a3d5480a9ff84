"""Real servers for tests: `penstock serve` as a process of its own, and small models for it to serve."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.pb.inference import grpc_service_pb2 as pb

ROOT = Path(__file__).parent.parent
START_S = 90.0
STOP_S = 40.0

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


class ServerProcess:
    """Use it as a context: it starts, waits until it is ready, and ends by SIGTERM."""

    def __init__(
        self,
        models: Path,
        folder: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` gets the log and the server's own storage; `flags` go to `penstock serve`."""
        self.http_port = free_port()
        self.grpc_port = free_port()
        self.folder = folder
        self.log_file = folder / "server.log"
        self._models = models
        self._flags = flags
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "start the server first"
        return self._process.pid

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "penstock", "serve", "--models", str(self._models)]
        command += ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        command += ["--data-dir", str(self.folder / "data"), *self._flags]
        source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": source, **self._environment}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder
            )

    def wait_ready(self, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._check_running()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.http_url}/v2/health/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"the server was not ready within {timeout_s} s:\n{self.log_tail()}")

    def terminate(self, timeout_s: float = STOP_S) -> int:
        """Ends it gently and returns its exit code; what does not end is killed, and that is an error."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TimeoutError(f"the server did not end within {timeout_s} s:\n{self.log_tail()}") from None

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; histograms by `name_count` or `name_sum`."""
        answer = httpx.get(f"{self.http_url}/metrics.json", timeout=30)
        return sum(
            sample["value"]
            for metric in answer.json().values()
            for sample in metric["samples"]
            if sample["name"] in (name, f"{name}_total") and labels.items() <= sample["labels"].items()
        )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.http_url}/v1/status", timeout=30).json()
        return found

    def log_lines(self) -> list[dict[str, Any]]:
        """What it logged, without what it printed otherwise."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def _check_running(self) -> None:
        if not self.is_running():
            raise RuntimeError(f"the server ended before it was ready:\n{self.log_tail()}")

    def __enter__(self) -> "ServerProcess":
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.terminate()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


def eventually(is_true: Callable[[], object], what: str, within_s: float = 30.0) -> None:
    """Asks until it is true; the server needs a moment for what follows from an answer."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, f"within {within_s} s it was never so: {what}"
        time.sleep(0.05)


def floats(model: str, *numbers: float, rows: int = 1, version: str = "", request_id: str = "") -> pb.ModelInferRequest:
    """A request with `x` FP32 [rows, len(numbers)]."""
    array = np.tile(np.array(numbers, np.float32), (rows, 1))
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=array.shape)
    message.raw_input_contents.append(array.tobytes())
    return message


def floats_json(*numbers: float, rows: int = 1) -> dict[str, Any]:
    """The same over REST."""
    shape = [rows, len(numbers)]
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": [*numbers] * rows}]}


def answered(response: pb.ModelInferResponse) -> list[float]:
    """The numbers of `y`."""
    (raw,) = response.raw_output_contents
    return list(np.frombuffer(raw, np.float32).tolist())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_identity(repository: Path, name: str, datatype: str, settings: str = "") -> None:
    """A model `x` → `y` of any size [n, m] that gives back what it gets."""
    kind = IDENTITY_TYPES[datatype]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [helper.make_tensor_value_info("x", kind, ["n", "m"])],
        [helper.make_tensor_value_info("y", kind, ["n", "m"])],
    )
    write_model(repository, name, graph, settings)


def write_add_sub(repository: Path, name: str, settings: str = "") -> None:
    """Two inputs and two outputs: `sum` and `difference` of `a` and `b`, INT32 [n, 4]."""
    shape = ["n", 4]
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        "add_sub",
        [helper.make_tensor_value_info(each, TensorProto.INT32, shape) for each in ("a", "b")],
        [helper.make_tensor_value_info(each, TensorProto.INT32, shape) for each in ("sum", "difference")],
    )
    write_model(repository, name, graph, settings)


def write_slow(repository: Path, name: str, settings: str = "") -> None:
    """A model `x` → `y`, FP32 [n, m], that gives back what it gets after as many rounds of work as its largest number.

    A round takes about half a millisecond.
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
    graph = helper.make_graph(
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
    write_model(repository, name, graph, settings)


def write_model(repository: Path, name: str, graph: onnx.GraphProto, settings: str = "", version: int = 1) -> None:
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    (folder.parent / "model.yaml").write_text(f"task: tensor\n{settings}")
