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

from benchmarks.peers import oip
from benchmarks.peers.peer import HOST, MINILM, NOOP, SRCNN, Assets, Launch, Setting, find_free_ports

HERE = Path(__file__).parent
DEFAULTS = {"way": "python", "instances": 1, "threads": 1, "batch": 1, "delay_us": 0, "alike": False}
TWO = {"instances": 2}
PYTRITON = {"way": "pytriton", **TWO}
SETTINGS: dict[str, dict[str, oip.Values]] = {
    MINILM: {
        "2 instances, 1 thread, no batching": TWO,
        "2 instances, 1 thread, batches of 8, alike": {**TWO, "batch": 8, "alike": True},
        "2 instances, 1 thread, batches of 32 in 2 ms, alike": {**TWO, "batch": 32, "delay_us": 2000, "alike": True},
        "1 instance, 2 threads, batches of 8": {"threads": 2, "batch": 8},
        "PyTriton, 2 instances, 1 thread, batches of 8, alike": {**PYTRITON, "batch": 8, "alike": True},
    },
    # Batches do nothing for photographs: the model takes one at a time.
    SRCNN: {
        "2 instances, 1 thread, no batching": TWO,
        "1 instance, 2 threads, no batching": {"threads": 2},
        "PyTriton, 2 instances, 1 thread, no batching": PYTRITON,
    },
    NOOP: {
        "1 instance, no batching": {},
        "2 instances, no batching": TWO,
        "1 instance, batches of 32": {"batch": 32},
        "2 instances, batches of 8": {**TWO, "batch": 8},
        "PyTriton, 1 instance, batches of 32": {"way": "pytriton", "batch": 32},
    },
}


class Triton(oip.OipPeer):
    name = "triton"
    title = "Triton 2.51 (PyTriton 0.7.0)"
    defaults = DEFAULTS
    candidates = SETTINGS

    def protocols(self, workload: str) -> Sequence[str]:
        return ("rest", "grpc")

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        rest, grpc = find_free_ports(2)
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


PEER = Triton()
