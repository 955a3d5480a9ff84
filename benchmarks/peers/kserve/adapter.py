"""KServe: its Python ModelServer with a custom Model, as its guide to custom predictors does it.

What was set, and why:
- Logging off with `--log_config_file` and `--enable_latency_logging=false`: otherwise every request is three lines.
- `pool`: predict is a coroutine that hands the work to that many threads, each with an engine of its own, so that the
  event loop stays free; 0 is KServe's plain synchronous predict in the event loop.
- `workers`: KServe's `--workers`, processes that share the REST port. KServe serves gRPC from the first process alone,
  whatever their number, so that gRPC gains from `pool` and from the engine's threads only.
- uvloop, which KServe brings along and uses on its own only where there are several workers.
- No batching: KServe's batcher is not in the server but in the agent, a sidecar in a Kubernetes pod, and speaks V1
  over HTTP only.
- OpenVINO in BF16 is the model's own doing, and a candidate for the best alone.

Encodings: raw contents over gRPC. Over REST the tensor in binary, with one exception: KServe decodes a BYTES tensor
that comes in binary as UTF-8 text and refuses a JPEG, so a photograph comes as base64 in JSON. The answer is always
binary. It is chunked: KServe drops the Content-Length of a binary answer.
"""

import base64
import json
from pathlib import Path

from benchmarks.peers import oip
from benchmarks.peers.peer import MINILM, NOOP, SRCNN, Assets, Item, Launch, Setting, find_free_ports

HERE = Path(__file__).parent
QUIET = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"errors": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}},
    "loggers": {
        "kserve": {"handlers": ["errors"], "level": "WARNING", "propagate": False},
        "uvicorn": {"handlers": ["errors"], "level": "WARNING", "propagate": False},
        # Without a handler uvicorn does not even build the line.
        "uvicorn.access": {"handlers": [], "level": "WARNING", "propagate": False},
    },
}
ENGINES = {
    "1 worker, 2 pool threads of 1 thread": {"pool": 2},
    "1 worker, in the event loop, 2 threads": {"threads": 2},
    "1 worker, 1 pool thread of 2 threads": {"pool": 1, "threads": 2},
    "2 workers, in the event loop, 1 thread": {"workers": 2},
}
DEFAULTS = {"workers": 1, "pool": 0, "threads": 1}
SETTINGS = {
    MINILM: ENGINES,
    SRCNN: ENGINES,
    NOOP: {
        "1 worker, in the event loop": {},
        "1 worker, 1 pool thread": {"pool": 1},
        "2 workers, in the event loop": {"workers": 2},
    },
}


class KServe(oip.OipPeer):
    name = "kserve"
    title = "KServe 0.21.0"
    defaults = DEFAULTS
    candidates = SETTINGS

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        rest, grpc = find_free_ports(2)
        log = folder / "log.json"
        log.write_text(json.dumps(QUIET))
        options = {
            "model_name": workload,
            "model": assets.folder(workload),
            "folder": folder,
            "http_port": rest,
            "grpc_port": grpc,
            "enable_latency_logging": "false",
            "log_config_file": log,
            **setting.values,
        }
        command = [python, HERE / "server.py", *(f"--{name}={value}" for name, value in options.items())]
        return oip.launch(command, workload, rest, grpc)

    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        if protocol == "rest" and workload == SRCNN:
            return oip.make_json_request(workload, [base64.b64encode(item).decode()], binary_data_output=True)
        return super().request(workload, protocol, item)


PEER = KServe()
