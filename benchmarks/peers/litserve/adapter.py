"""LitServe 0.2.19: REST only, raw bytes in and out.

What its documentation advises, and what was set:
- "For CPU, set workers_per_device to the number of cores": two workers with one thread each, and one with two threads.
- `fast_queue=True` for more than 100 requests a second: answers come back through ZeroMQ. Requests go through a
  `multiprocessing.Manager` queue either way.
- `max_batch_size` with a small `batch_timeout`. A timeout of 0 makes an idle worker ask for requests without a pause,
  so it is never used. SRCNN is not batched: its work grows with the batch.
- As many API server processes as workers (LitServe's default), or one, as two cores leave little for them.
- `log_level="warning"`, no request timeout, no client file.
- A body typed as bytes, and a `Response` with the bytes of the answer: no JSON. LitServe has no gRPC.
"""

import json
from pathlib import Path

from benchmarks.peers.peer import HOST, MINILM, NOOP, SHARED, SRCNN, Assets, Launch, Setting, find_free_ports
from benchmarks.peers.raw import Candidates, RawPeer, describe_handler

TWO = {"workers": 2, "threads": 1}
ONE = {"workers": 1, "threads": 2}
ALIKE = {"batch": 32, "wait_s": 0.005, "alike": True}
SETTINGS: Candidates = {
    MINILM: {
        "2 workers, 1 thread, no batching": TWO,
        "2 workers, 1 thread, batches of 8 in 5 ms": {**TWO, "batch": 8, "wait_s": 0.005},
        "2 workers, 1 thread, batches of 32 in 5 ms, like lengths together": TWO | ALIKE,
        "1 worker, 2 threads, batches of 32 in 5 ms, like lengths together": ONE | ALIKE,
    },
    SRCNN: {
        "2 workers, 1 thread": TWO,
        "2 workers, 1 thread, 1 API server": {**TWO, "api_servers": 1},
        "1 worker, 2 threads": ONE,
    },
    NOOP: {
        "1 worker, 1 API server, no batching": {"workers": 1},
        "2 workers, 2 API servers, no batching": {"workers": 2},
        "1 worker, 1 API server, batches of 32 in 1 ms": {"workers": 1, "batch": 32, "wait_s": 0.001},
        "1 worker, 1 API server, no batching, default queue": {"workers": 1, "fast_queue": False},
    },
}


class LitServe(RawPeer):
    name = "litserve"
    title = "LitServe 0.2.19"
    candidates = SETTINGS

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        [port] = find_free_ports(1)
        defaults = {"api_servers": setting.values["workers"], "batch": 1, "wait_s": 0.0, "fast_queue": True}
        given = {
            **defaults,
            **setting.values,
            "port": port,
            "handler": describe_handler(workload, assets, setting.values),
        }
        target = f"{HOST}:{port}"
        return Launch(
            command=(str(python), str(Path(__file__).with_name("server.py")), json.dumps(given)),
            environment={"PYTHONPATH": str(SHARED)},
            targets={"rest": target},
            ready_url=f"http://{target}/health",
        )


PEER = LitServe()
