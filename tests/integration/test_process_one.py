"""The server as the first process of a container, in a separate process namespace."""

import os
import signal
from pathlib import Path

import httpx
import psutil

from benchmarks.repository import write_model
from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from tests.servers import PROCESS_NAMESPACE

CODE = b"""
import os

class Model:
    def infer(self, inputs, context):
        return {"y": inputs["x"] * 0 + os.getppid()}
"""
TENSORS = {
    "inputs": [{"name": "x", "datatype": "INT64", "shape": [-1]}],
    "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}],
}
BODY = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [0]}]}


def test_workers_keep_running_and_orphans_are_reaped(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "own", "model.py", CODE, engine="python", python=TENSORS, instances={"count": 1})
    server = ServerProcess(tmp_path / "models", tmp_path, before=PROCESS_NAMESPACE)
    (first,) = psutil.Process(server.pid).children()
    try:
        answer = httpx.post(f"{server.http_url}/v2/models/own/infer", json=BODY).json()
        worker = answer["outputs"][0]["data"][0]
        assert worker == server.ready_workers()["worker-0"], "process ids are those of the namespace"
        assert worker > 1
        (outside,) = server.children("worker").values()
        os.kill(outside, signal.SIGKILL)  # the model's process is now the first process's child, and ends
        eventually(lambda: server.ready_workers().get("worker-0", worker) != worker, "another worker is ready")
        eventually(
            lambda: psutil.STATUS_ZOMBIE not in {each.status() for each in first.children()}, "no zombie is left"
        )
    finally:
        first.terminate()
        assert server.process.wait(60) == 0
