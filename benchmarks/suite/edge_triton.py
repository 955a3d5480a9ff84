"""Triton with TLS on its gRPC port, for the comparison with the edge; only if the peers' environment has it."""

from dataclasses import replace
from pathlib import Path

from benchmarks.peers import venvs
from benchmarks.peers.peer import NOOP, Assets, Setting
from benchmarks.peers.servers import Server
from benchmarks.peers.triton.adapter import DEFAULTS, HERE, PEER
from penstock.wire.credentials.tls_files import TlsFiles

MODEL = NOOP
INSTALL = "python -m benchmarks.peers --only triton"
# Triton's fastest setting for the no-op, as found by benchmarks/peers.
SETTING = Setting("1 instance, batches of 32", {**DEFAULTS, "batch": 32, "engine": "onnx"})


def find_triton() -> Path | None:
    """Return the Python of Triton's environment, or None if Triton is not installed."""
    return venvs.find_installed(HERE, HERE.parent / ".venvs")


class TritonServer(Server):
    """Triton with the no-op model; use it as a context manager."""

    def __init__(self, python: Path, model: Path, folder: Path, files: TlsFiles) -> None:
        """Prepare the server. `model` is the folder with the no-op's model.onnx."""
        folder.mkdir(parents=True)
        plain = PEER.launch(NOOP, SETTING, Assets(model, model, model, model), folder, python)
        tls = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")
        super().__init__(replace(plain, command=(*plain.command, *tls)), folder)
        self.grpc = plain.targets["grpc"]
        self.http = plain.targets["rest"]
        self.key = self.key_file = ""

    def cpu_s(self) -> dict[str, float]:
        return {"triton": self.usage().cpu_s}
