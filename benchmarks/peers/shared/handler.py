"""Converts bytes to bytes, in the peers whose handlers get the unchanged body of a request."""

import io
from collections.abc import Sequence
from typing import Any


class Handler:
    """Converts a text to 384 float32, a JPEG to a PNG, or returns 256 float32 unchanged. Not thread-safe."""

    def __init__(self, workload: str, folder: str, engine: str = "onnx", threads: int = 1, alike: bool = False) -> None:
        self._many = {"minilm": self._embed, "srcnn": self._upscale, "noop": self._repeat}[workload]
        self._alike = alike
        self._model = load(workload, folder, engine, threads)
        # The first call of an engine is slow: it is made before the server says that it is ready.
        self.one({"minilm": b"a text", "srcnn": small_jpeg(), "noop": bytes(1024)}[workload])

    def one(self, body: bytes) -> bytes:
        return self._many([body])[0]

    def many(self, bodies: Sequence[bytes]) -> list[bytes]:
        return self._many(bodies)

    def _embed(self, bodies: Sequence[bytes]) -> list[bytes]:
        texts = [body.decode() for body in bodies]
        vectors = self._model.embed_alike(texts) if self._alike else self._model.embed(texts)
        return [vector.tobytes() for vector in vectors]

    def _upscale(self, bodies: Sequence[bytes]) -> list[bytes]:
        return [self._model.upscale(body) for body in bodies]

    def _repeat(self, bodies: Sequence[bytes]) -> list[bytes]:
        import numpy as np

        x = np.frombuffer(b"".join(bodies), np.float32).reshape(len(bodies), 256)
        return [row.tobytes() for row in self._model.run(x)]


def load(workload: str, folder: str, engine: str = "onnx", threads: int = 1) -> Any:
    """Return an Embedder, an Upscaler or a Noop for the workload."""
    if workload == "minilm":
        from embedder import Embedder

        return Embedder(folder, engine, threads)
    if workload == "srcnn":
        from upscaler import Upscaler

        return Upscaler(folder, engine, threads)
    from noop import Noop

    return Noop(folder)


def small_jpeg() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (320, 240)).save(file, "JPEG")
    return file.getvalue()
