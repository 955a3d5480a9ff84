"""The identity of a tensor, run by ONNX Runtime in the handlers of all peers."""

import os
from pathlib import Path
from typing import Any


class Noop:
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from embedder import onnx_run

        self._run = onnx_run(Path(folder) / "model.onnx", 1)

    def run(self, x: Any) -> Any:
        """Return the float32 array [n, 256] unchanged."""
        return self._run({"x": x})
