"""Runs an S3 server as a separate process: `rclone serve s3`."""

import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.peer import find_free_ports
from benchmarks.waiting import eventually
from penstock.core.config import S3Settings
from penstock.wire.credentials.tls_files import NO_FILES, TlsFiles

START_S = 20.0
KEY_ID, SECRET = "PENSTOCKTESTKEY", "penstock-test-secret"
BUCKET = "models"


class S3Server:
    """A context manager for the server."""

    def __init__(self, folder: Path, tls: TlsFiles = NO_FILES) -> None:
        (self.port,) = find_free_ports(1)
        self.folder = folder
        self._tls = tls
        self.settings = S3Settings(
            endpoint=f"{'https' if tls.cert else 'http'}://127.0.0.1:{self.port}",
            ca=tls.ca,
            region="us-east-1",
            access_key_id=KEY_ID,
            secret_access_key=SECRET,  # type: ignore[arg-type]
        )
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def start(self) -> None:
        (self.folder / BUCKET).mkdir(parents=True, exist_ok=True)
        rclone = Path(sys.executable).with_name("rclone")
        command = [str(rclone), "serve", "s3", str(self.folder), "--addr", f"127.0.0.1:{self.port}"]
        command += ["--auth-key", f"{KEY_ID},{SECRET}", "--config", "", "--vfs-cache-mode", "off"]
        if self._tls.cert:
            command += ["--cert", self._tls.cert, "--key", self._tls.key]
        with self.folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        eventually(self._is_answering, "rclone answers", START_S)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _is_answering(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def __enter__(self) -> "S3Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
