"""Triton, as PyTriton's package brings it, in one of two ways; runs in PyTriton's venv.

`python`: the server itself with a model repository for its Python backend. `pytriton`: PyTriton, which puts functions
of this process behind a proxy model in the server.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytriton
from work import INPUTS, OUTPUTS, batch_run

HERE = Path(__file__).resolve().parent


def serve_python_backend(options: argparse.Namespace) -> None:
    """Replace this process by the server, so that ending this process ends the server."""
    root = Path(pytriton.__file__).parent
    backend = options.folder / "backends" / "python"
    backend.mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    for file in (*(root / "tritonserver" / "backends" / "python").glob("*.*"), stub):
        (backend / file.name).symlink_to(file)
    model = options.folder / "models" / options.workload
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").symlink_to(HERE / "backend.py")
    (model / "config.pbtxt").write_text(format_config(options))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(root.parent / "nvidia_pytriton.libs"),
        # The backend's processes find the venv by the python3 that comes first.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    flags = {
        "model-repository": options.folder / "models",
        "backend-directory": options.folder / "backends",
        "http-address": options.host,
        "http-port": options.rest,
        "grpc-address": options.host,
        "grpc-port": options.grpc,
        "allow-metrics": "false",
        "log-info": "false",
        **list_tls_flags(options),
    }
    program = str(root / "tritonserver" / "bin" / "tritonserver")
    os.execve(program, [program, *(f"--{name}={value}" for name, value in flags.items())], environment)


def list_tls_flags(options: argparse.Namespace) -> dict[str, str]:
    """Return the flags for TLS on the gRPC port; Triton has none for REST."""
    if not options.tls_cert:
        return {}
    return {"grpc-use-ssl": "true", "grpc-server-cert": options.tls_cert, "grpc-server-key": options.tls_key}


def format_config(options: argparse.Namespace) -> str:
    """Return the model's config.pbtxt."""
    parameters = {name: getattr(options, name) for name in ("model", "engine", "threads", "alike")}
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: {options.delay_us} }}\n" if options.batch > 1 else ""
    return (
        f'name: "{options.workload}"\nbackend: "python"\nmax_batch_size: {options.batch}\n'
        f"input [ {format_tensor(INPUTS[options.workload])} ]\noutput [ {format_tensor(OUTPUTS[options.workload])} ]\n"
        f"instance_group [ {{ count: {options.instances} kind: KIND_CPU }} ]\n{batching}"
    ) + "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n' for name, value in parameters.items()
    )


def format_tensor(described: tuple[str, str, int]) -> str:
    name, datatype, size = described
    return f'{{ name: "{name}" data_type: {datatype} dims: [ {size} ] }}'


def serve_pytriton(options: argparse.Namespace) -> None:
    import numpy as np
    from pytriton.decorators import batch
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    wanted, given = INPUTS[options.workload], OUTPUTS[options.workload]
    types = {"TYPE_STRING": np.bytes_, "TYPE_FP32": np.float32}

    def instance() -> Any:
        run = batch_run(options.workload, {name: str(value) for name, value in vars(options).items()})

        @batch
        def infer(**inputs: Any) -> dict[str, Any]:
            return {given.name: run(inputs[wanted.name])}

        return infer

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # PyTriton stops the server on KeyboardInterrupt only
    triton = Triton(
        config=TritonConfig(
            http_address=options.host,
            http_port=options.rest,
            grpc_address=options.host,
            grpc_port=options.grpc,
            allow_metrics=False,
        ),
        workspace=options.folder / "w",
    )
    triton.bind(
        model_name=options.workload,
        infer_func=[instance() for _ in range(options.instances)],
        inputs=[Tensor(name=wanted.name, dtype=types[wanted.datatype], shape=(wanted.size,))],
        outputs=[Tensor(name=given.name, dtype=types[given.datatype], shape=(given.size,))],
        config=ModelConfig(
            max_batch_size=options.batch, batcher=DynamicBatcher(max_queue_delay_microseconds=options.delay_us)
        ),
    )
    triton.serve()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("python", "pytriton"), required=True)
    for name in ("workload", "model", "engine", "alike", "host"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("tls-cert", "tls-key"):
        parser.add_argument(f"--{name}", default="")
    for name in ("rest", "grpc", "instances", "threads", "batch", "delay_us"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse_arguments()
    {"python": serve_python_backend, "pytriton": serve_pytriton}[given.way](given)
