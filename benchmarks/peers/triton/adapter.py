"""Triton, from the package of PyTriton: the server with its Python backend; that package has no ONNX Runtime backend.

What was set, and why:
- `way`: `python` is Triton's own Python backend with a model repository, each instance a process. `pytriton` is what
  the package is made for: functions of a Python process, each instance a thread, behind a proxy model in the Python
  backend, which costs a second way between processes. Both are tried.
- `instances`: two for two cores, or one with two engine threads.
- `batch`, `delay_us`: the dynamic batcher. NVIDIA's guide advises to begin with no delay, then to add some where the
  latency allows it. Without batching the greatest batch is 1 and there is no batcher.
- `alike`: the model sorts a batch's texts by length and runs like ones together.
- OpenVINO in BF16 is the model's own doing, and a candidate for the best alone.
- No metrics, no log of requests: neither is asked for.

Encodings: raw contents over gRPC, binary tensors over REST, both ways. REST is named first: with the no-op it took the
server no more processor time a request than gRPC, mostly less.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import oip
from benchmarks.peers.peer import HOST, MINILM, NOOP, SAME, Assets, Launch, Setting, free_ports

HERE = Path(__file__).parent


class Triton(oip.OipPeer):
    name = "triton"
    title = "Triton 2.51 (PyTriton 0.7.0)"

    def protocols(self, workload: str) -> Sequence[str]:
        return ("rest", "grpc")

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        if workload == NOOP:
            return (
                setting("1 instance, no batching"),
                setting("2 instances, no batching", instances=2),
                setting("1 instance, batches of 32", batch=32),
                setting("2 instances, batches of 8", instances=2, batch=8),
                setting("PyTriton, 1 instance, batches of 32", way="pytriton", batch=32),
            )
        engine = "onnx" if comparison == SAME else "openvino"
        return text_settings(engine) if workload == MINILM else photo_settings(engine)

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        rest, grpc = free_ports(2)
        options = {
            "workload": workload,
            "model": assets.folder(workload),
            "folder": folder,
            "host": HOST,
            "rest": rest,
            "grpc": grpc,
            **setting.values,
        }
        command = [python, HERE / "server.py", *(f"--{name}={value}" for name, value in options.items())]
        return oip.launch(command, workload, rest, grpc)


def text_settings(engine: str) -> Sequence[Setting]:
    return (
        setting("2 instances, 1 thread, no batching", engine, instances=2),
        setting("2 instances, 1 thread, batches of 8, alike", engine, instances=2, batch=8, alike=True),
        setting(
            "2 instances, 1 thread, batches of 32 in 2 ms, alike",
            engine,
            instances=2,
            batch=32,
            delay_us=2000,
            alike=True,
        ),
        setting("1 instance, 2 threads, batches of 8", engine, threads=2, batch=8),
        setting(
            "PyTriton, 2 instances, 1 thread, batches of 8, alike",
            engine,
            way="pytriton",
            instances=2,
            batch=8,
            alike=True,
        ),
    )


def photo_settings(engine: str) -> Sequence[Setting]:
    """Batches do nothing for photographs: the model takes one at a time."""
    return (
        setting("2 instances, 1 thread, no batching", engine, instances=2),
        setting("1 instance, 2 threads, no batching", engine, threads=2),
        setting("PyTriton, 2 instances, 1 thread, no batching", engine, way="pytriton", instances=2),
    )


def setting(name: str, engine: str = "onnx", **values: Any) -> Setting:
    defaults = {"way": "python", "instances": 1, "threads": 1, "batch": 1, "delay_us": 0, "alike": False}
    return oip.engine_setting(name, defaults, engine, **values)


PEER = Triton()
