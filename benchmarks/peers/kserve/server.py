"""KServe's ModelServer with one model of our own; runs in KServe's venv."""

import argparse
import asyncio
import base64
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import uvloop
from handler import load
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server

OUTPUTS = {"minilm": ("vector", "FP32"), "srcnn": ("image", "BYTES"), "noop": ("y", "FP32")}


class Handler(Model):
    """A handler that runs in the event loop, as in KServe's examples."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options.model_name)
        self._options = options
        self._runners: SimpleQueue[Callable[[Any], Any]] = SimpleQueue()
        self._is_all_there = False
        self.load()

    def __reduce__(self) -> Any:
        """Let each worker load its own engine, because an engine cannot be sent to another process."""
        return type(self), (self._options,)

    def load(self) -> bool:
        for _ in range(max(1, self._options.pool)):
            self._runners.put(make_runner(self._options))
        self.ready = True
        return True

    async def healthy(self) -> bool:
        """Return True once every worker listens; otherwise the first worker would get all connections."""
        if not self._is_all_there:
            self._is_all_there = len(list(self._options.folder.glob("worker-*"))) >= self._options.workers
        return bool(self.ready and self._is_all_there)

    def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        return self._answer(payload)

    def _answer(self, request: InferRequest) -> InferResponse:
        run = self._runners.get()
        try:
            array = run(request.inputs[0].as_numpy())
        finally:
            self._runners.put(run)
        name, datatype = OUTPUTS[self.name]
        return InferResponse(
            response_id=request.id,
            model_name=self.name,
            infer_outputs=[InferOutput(name, list(array.shape), datatype, array)],
            # For REST alone: over gRPC an array always leaves as raw contents, and KServe fails where this asks for it.
            use_binary_outputs=request.use_binary_outputs and not request.from_grpc,
        )


class PooledHandler(Handler):
    """A handler that runs in its own threads, which keeps the event loop free because engines release the GIL."""

    def load(self) -> bool:
        self._pool = ThreadPoolExecutor(self._options.pool)
        return super().load()

    async def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, payload)


def make_runner(options: argparse.Namespace) -> Callable[[Any], Any]:
    model = load(options.model_name, options.model, options.engine, options.threads)
    if options.model_name == "noop":
        return lambda array: model.run(array)
    if options.model_name == "srcnn":
        return lambda array: np.array([[model.upscale(decode_photo(array.item()))]], dtype=object)
    return lambda array: model.embed([decode_text(array.item())])


def decode_text(element: str | bytes) -> str:
    """Return the text; gRPC passes bytes, REST passes the string that KServe has decoded."""
    return element.decode() if isinstance(element, bytes) else element


def decode_photo(element: str | bytes) -> bytes:
    """Return the photograph.

    GRPC passes bytes, REST passes base64 because KServe accepts only text in BYTES tensors.
    """
    return element if isinstance(element, bytes) else base64.b64decode(element)


@asynccontextmanager
async def announce(_: Any) -> AsyncIterator[None]:
    """Report that this worker is ready; uvicorn calls this in each worker right before it listens."""
    (parse_arguments().folder / f"worker-{os.getpid()}").touch()
    yield


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", default="onnx")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pool", type=int, default=0)
    return parser.parse_args()


# At import, because a worker imports this file and takes its application from kserve.model_server.
model_server.app.router.lifespan_context = announce

if __name__ == "__main__":
    uvloop.install()  # KServe itself uses it only with several workers
    asyncio.set_event_loop(asyncio.new_event_loop())  # KServe asks for one before it runs; uvloop does not make it
    options = parse_arguments()
    handler = PooledHandler(options) if options.pool else Handler(options)
    ModelServer(grace_period=2).start([handler])
