"""BentoML 1.4.39: REST only, raw bytes in and out.

What its documentation advises, and what was set:
- `workers`: as many as cores for work that the interpreter's lock holds up; two with one thread, and one with two.
- `threads=1`: a worker runs one call, or one batch, at a time.
- `batchable=True` with `max_batch_size`. How long to wait is BentoML's own to find (adaptive batching);
  `max_latency_ms` stays at its 60 s, as it only says when a waiting request is refused.
  SRCNN is not batched: its work grows with the batch.
- Metrics and access logs off, and all paths excluded from tracing.
- uvloop and httptools installed: uvicorn, which BentoML runs, takes them where they are there.
- Input and output descriptors that read the body and write it (`input_spec`, `output_spec`): no JSON, which answers of
  a batched method would be else.
- Since 1.2 a service has no gRPC.
"""

import json
from pathlib import Path

from benchmarks.peers.peer import HOST, MINILM, NOOP, SHARED, SRCNN, Assets, Launch, Setting, find_free_ports
from benchmarks.peers.raw import Candidates, RawPeer, describe_handler

TWO = {"workers": 2, "threads": 1}
ONE = {"workers": 1, "threads": 2}
SETTINGS: Candidates = {
    MINILM: {
        "2 workers, 1 thread, no batching": TWO,
        "2 workers, 1 thread, batches of 8": {**TWO, "batch": 8},
        "2 workers, 1 thread, batches of 32, like lengths together": {**TWO, "batch": 32, "alike": True},
        "1 worker, 2 threads, batches of 32, like lengths together": {**ONE, "batch": 32, "alike": True},
    },
    SRCNN: {
        "2 workers, 1 thread": TWO,
        "1 worker, 2 threads": ONE,
    },
    NOOP: {
        "1 worker, no batching": {"workers": 1},
        "2 workers, no batching": {"workers": 2},
        "2 workers, batches of 32": {"workers": 2, "batch": 32},
    },
}


class BentoML(RawPeer):
    name = "bentoml"
    title = "BentoML 1.4.39"
    candidates = SETTINGS

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        [port] = find_free_ports(1)
        ready = folder.absolute() / "ready"
        ready.mkdir()
        given = {
            "workers": setting.values["workers"],
            "batch": setting.values.get("batch", 1),
            "ready": str(ready),
            "handler": describe_handler(workload, assets, setting.values),
        }
        here = str(Path(__file__).parent.absolute())
        options = ("--working-dir", here, "--host", HOST, "--port", str(port), "--timeout-keep-alive", "600")
        target = f"{HOST}:{port}"
        return Launch(
            # Not python -m bentoml: that would look for the package in the current folder first.
            command=(str(python.parent / "bentoml"), "serve", "server:Model", *options),
            environment={
                "PYTHONPATH": str(SHARED),
                "BENTO_SETTING": json.dumps(given),
                "BENTOML_HOME": str(folder.absolute()),
                "BENTOML_DO_NOT_TRACK": "True",
                "PEER_MARK": str(folder.absolute()),
            },
            targets={"rest": target},
            ready_url=f"http://{target}/readyz",
            # BentoML ends its workers at SIGTERM, but a kill leaves them: each has its own process group.
            stop_command=(str(python), str(SHARED / "leftovers.py"), str(folder.absolute())),
        )


PEER = BentoML()
