"""MLServer: a custom runtime (MLModel), started with `mlserver start` on a folder of settings, as its guide does it.

What was set, and why:
- `debug: false`, which ends the access logs of REST and gRPC, `metrics_endpoint: null`, which takes the Prometheus
  middleware and interceptor out, and `gzip_enabled: false`. MLServer runs on uvloop by itself.
- `parallel_workers`: processes that run the model; the documentation advises as many as there are cores. 0 runs the
  model in the server's own event loop, which saves the way to a worker and back.
- `max_batch_size`, `max_batch_time`: adaptive batching. Batches form in the server and go to a worker whole. The
  documentation leaves both to experiment; a time of 0 would turn it off, and the batcher waits that long for a batch
  that does not fill, so that the times are short.
- `alike`: the runtime sorts a batch's texts by length and runs like ones together.
- OpenVINO in BF16 is the runtime's own doing, and a candidate for the best alone.

Encodings: raw contents over gRPC, both ways. MLServer's REST has no binary tensors: numbers are JSON, and photographs
are base64 there and back.
"""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import oip
from benchmarks.peers.peer import HOST, MINILM, NOOP, SRCNN, Assets, Item, Launch, Setting, find_free_ports

HERE = Path(__file__).parent
DEFAULTS = {"workers": 0, "threads": 1, "batch": 0, "batch_ms": 0, "alike": False}
SETTINGS = {
    MINILM: {
        "2 workers, 1 thread, no batching": {"workers": 2},
        "2 workers, 1 thread, batches of 8 in 5 ms": {"workers": 2, "batch": 8, "batch_ms": 5},
        "2 workers, 1 thread, batches of 32 in 5 ms, alike": {"workers": 2, "batch": 32, "batch_ms": 5, "alike": True},
        "no workers, 2 threads, no batching": {"threads": 2},
    },
    # Batches do nothing for photographs: the runtime takes one at a time.
    SRCNN: {
        "2 workers, 1 thread, no batching": {"workers": 2},
        "1 worker, 2 threads, no batching": {"workers": 1, "threads": 2},
        "no workers, 2 threads, no batching": {"threads": 2},
    },
    NOOP: {
        "no workers, no batching": {},
        "no workers, batches of 32 in 1 ms": {"batch": 32, "batch_ms": 1},
        "1 worker, no batching": {"workers": 1},
        "1 worker, batches of 32 in 1 ms": {"workers": 1, "batch": 32, "batch_ms": 1},
        "2 workers, no batching": {"workers": 2},
    },
}


class MLServer(oip.OipPeer):
    name = "mlserver"
    title = "MLServer 1.7.1"
    defaults = DEFAULTS
    candidates = SETTINGS

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        rest, grpc = find_free_ports(2)
        values = setting.values
        server = {
            "debug": False,
            "host": HOST,
            "http_port": rest,
            "grpc_port": grpc,
            "metrics_endpoint": None,
            "gzip_enabled": False,
            "parallel_workers": values["workers"],
            "environments_dir": str(folder / "environments"),
        }
        extra = {"model": str(assets.folder(workload)), **{key: values[key] for key in ("engine", "threads", "alike")}}
        runtime = {
            "name": workload,
            "implementation": "server.Handler",
            "max_batch_size": values["batch"],
            "max_batch_time": values["batch_ms"] / 1000,
            "parameters": {"extra": extra},
        }
        (folder / "settings.json").write_text(json.dumps(server))
        (folder / "model-settings.json").write_text(json.dumps(runtime))
        return oip.launch([python.parent / "mlserver", "start", folder], workload, rest, grpc, HERE)

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        if protocol == "grpc":
            return super().request(workload, protocol, item)
        if workload == NOOP:
            return oip.make_json_request(workload, np.asarray(item, np.float32).ravel().tolist())
        return oip.make_json_request(workload, [item if workload == MINILM else base64.b64encode(item).decode()])

    def answer(self, workload: str, protocol: str, body: bytes) -> Any:
        if protocol == "grpc":
            return super().answer(workload, protocol, body)
        data = json.loads(body)["outputs"][0]["data"]
        if workload == SRCNN:
            return base64.b64decode(data[0])
        return np.array(data, np.float32).reshape((1, 256) if workload == NOOP else -1)


PEER = MLServer()
