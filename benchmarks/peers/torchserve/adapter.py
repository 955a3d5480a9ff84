"""TorchServe 0.12.0: its Java frontend, and Python workers that run the shared code in a custom handler.

What was set, and why:

- Workers and threads. The performance guide starts with half the physical cores and one thread each, and advises to
  raise the number of workers; so two workers of one thread against one worker of two, on two cores.
- `batchSize` and `maxBatchDelay` are the first settings that the guide names. The delay is 1 ms, the smallest that
  still fills a batch from the queue (with 0 the frontend stops after the second request). A batch of texts is run in
  pieces of like lengths. Photographs are run one by one, so batches of them would only wait: `batchSize` is 1.
- `job_queue_size` 1000 in place of 100, so that no caller is refused. `number_of_netty_threads` and
  `netty_client_threads` are the number of cores, the documented default.
- `disable_system_metrics` spares the periodic Python process that measures the machine. The log configuration drops
  the access log and the metrics log, and the handler drops the worker's line per batch: all of them cost per request.
- `cpu_launcher_enable`, which the documentation advises for Intel's processors, pins workers to cores; one candidate
  tries it.
- Requests and answers are raw bytes: `application/octet-stream` is not decoded by the worker.
- Token authorization is disabled by its documented property, `disable_token_authorization`.
- Comparison "same" runs ONNX Runtime, "best" adds OpenVINO: the handler is the user's own code.

The model is an unpacked archive (`torch-model-archiver --archive-format no-archive`), whose handler reads the model's
files where they are. The command is the one that `torchserve --foreground` runs: that Python process would only wait
for Java, and not pass SIGTERM on to it. The frontend's sockets to its workers are in `folder`, so its path must be
short: a socket's path has 107 characters at most.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import (
    HOST,
    MINILM,
    NOOP,
    SAME,
    SHARED,
    SRCNN,
    Assets,
    Item,
    Launch,
    Setting,
    find_free_ports,
)
from benchmarks.peers.raw import RawPeer, encode_body

HERE = Path(__file__).parent
MODEL = "model"
PORTS = ("inference", "management", "metrics", "grpc_inference", "grpc_management", "worker")


def make_candidate(engine: str, workers: int, threads: int, batch: int, is_pinned: bool = False) -> Setting:
    words = [
        {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}[engine],
        f"{workers} worker{'s' * (workers > 1)}",
        f"{threads} thread{'s' * (threads > 1)}",
        f"batches of {batch}" if batch > 1 else "no batching",
        *(["pinned"] if is_pinned else []),
    ]
    values = {"engine": engine, "workers": workers, "threads": threads, "batch": batch, "is_pinned": is_pinned}
    return Setting(", ".join(words), values)


# Workers, threads and batches.
SHAPES = {
    MINILM: ((2, 1, 1), (1, 2, 1), (2, 1, 8), (1, 2, 32)),
    SRCNN: ((2, 1, 1), (1, 2, 1), (2, 2, 1)),
    NOOP: ((1, 1, 1), (2, 1, 1), (1, 1, 8), (1, 1, 32), (2, 1, 32)),
}


class TorchServe(RawPeer):
    name = "torchserve"
    title = "TorchServe 0.12.0"
    grpc_method = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    route = f"/predictions/{MODEL}"

    def settings(self, workload: str, comparison: str) -> Sequence[Setting]:
        """Return the candidates; those of the group "best" include one with ONNX Runtime."""
        if workload == NOOP:
            return [make_candidate("onnx", *shape) for shape in SHAPES[NOOP]]
        if comparison == SAME:
            engine, last = "onnx", make_candidate("onnx", 2, 1, 1, is_pinned=True)
        else:
            engine, last = "openvino", make_candidate("onnx", 2, 1, 8 if workload == MINILM else 1)
        return [*(make_candidate(engine, *shape) for shape in SHAPES[workload]), last]

    def launch(self, workload: str, setting: Setting, assets: Assets, folder: Path, python: Path) -> Launch:
        ports = dict(zip(PORTS, find_free_ports(len(PORTS)), strict=True))
        for name in ("store", "logs", "tmp", "loaded"):
            (folder / name).mkdir()
        (folder / "config.properties").write_text(format_properties(setting.values, ports))
        make_archive(workload, setting.values, assets.folder(workload), folder, python)
        return Launch(
            command=make_java_command(folder, python),
            environment={
                "PYTHONPATH": str(SHARED),
                # The frontend looks for the launcher that pins workers with plain `python`.
                "PATH": f"{python.parent}:{os.environ['PATH']}",
                "LOG_LOCATION": str(folder / "logs"),
                "METRICS_LOCATION": str(folder / "logs"),
                "OMP_NUM_THREADS": str(setting.values["threads"]),
            },
            targets={"rest": f"{HOST}:{ports['inference']}", "grpc": f"{HOST}:{ports['grpc_inference']}"},
            ready_url=f"http://{HOST}:{ports['inference']}/predictions/{MODEL}",
        )

    # PredictionResponse has its bytes where BytesValue has them, which RawPeer reads: in field 1.
    def request(self, workload: str, protocol: str, item: Item) -> bytes:
        if protocol == "grpc":
            return encode_field(1, MODEL.encode()) + encode_field(
                3, encode_field(1, b"data") + encode_field(2, encode_body(item))
            )
        return super().request(workload, protocol, item)


def format_properties(values: Mapping[str, Any], ports: Mapping[str, int]) -> str:
    lines = {f"{name}_address": f"http://{HOST}:{ports[name]}" for name in ("inference", "management", "metrics")}
    lines |= {f"{name}_port": str(ports[name]) for name in ("grpc_inference", "grpc_management")}
    lines |= {
        "initial_worker_port": str(ports["worker"]),  # the name of a unix socket, not a port that is opened
        "disable_token_authorization": "true",
        "disable_system_metrics": "true",
        "job_queue_size": "1000",
        "number_of_netty_threads": "2",
        "netty_client_threads": "2",
        "cpu_launcher_enable": str(values["is_pinned"]).lower(),
        "load_models": f"{MODEL}={MODEL}",
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def make_archive(workload: str, values: Mapping[str, Any], model_folder: Path, folder: Path, python: Path) -> None:
    handler = {"workload": workload, "folder": str(model_folder), "alike": values["batch"] > 1}
    handler |= {key: values[key] for key in ("engine", "threads", "workers")}
    handler["loaded"] = str(folder / "loaded")
    config = {
        "minWorkers": values["workers"],
        "maxWorkers": values["workers"],
        "batchSize": values["batch"],
        "maxBatchDelay": 1,
        "deviceType": "cpu",
        "handler": handler,
    }
    file = folder / "model-config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command: list[str | Path] = [python.parent / "torch-model-archiver", "--model-name", MODEL, "--version", "1.0"]
    command += ["--config-file", file]
    command += ["--handler", HERE / "service.py", "--export-path", folder / "store", "--archive-format", "no-archive"]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)


def make_java_command(folder: Path, python: Path) -> list[str]:
    java = shutil.which("java")
    if java is None:
        raise FileNotFoundError("TorchServe needs Java 17: apt-get install openjdk-17-jre-headless")
    home = next((python.parent.parent / "lib").glob("python3*/site-packages"))
    return [
        java,
        f"-Dmodel_server_home={home}",
        f"-Djava.io.tmpdir={folder / 'tmp'}",
        f"-Dlog4j.configurationFile=file://{HERE / 'log4j2.xml'}",
        *("-cp", f"{home}/ts/frontend/*", "org.pytorch.serve.ModelServer"),
        *("--python", str(python), "-f", str(folder / "config.properties"), "-s", str(folder / "store"), "-ncs"),
    ]


def encode_field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field of a protobuf message."""
    size, rest = bytearray(), len(value)
    while rest > 127:
        size.append(rest & 127 | 128)
        rest >>= 7
    size.append(rest)
    return bytes([number << 3 | 2, *size]) + value


PEER = TorchServe()
