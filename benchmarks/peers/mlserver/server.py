"""MLServer's custom runtime for every workload; runs in MLServer's venv, in the server itself or in its workers."""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import handler
import numpy as np
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

# A tensor of MLServer's is a flat list: of numbers, of bytes (gRPC) or of text (REST).
Elements = list[Any]
Run = Callable[[Elements], ResponseOutput]


class Handler(MLModel):
    """A handler whose request has a first dimension for the batch. Each worker runs one request at a time."""

    async def load(self) -> bool:
        options = self.settings.parameters.extra
        model = handler.load(self.name, options["model"], options["engine"], options["threads"])
        kinds = {"minilm": texts_to_vectors, "srcnn": photos_to_photos, "noop": arrays_to_arrays}
        self._run = kinds[self.name](model, options)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        data = payload.inputs[0].data
        output = self._run(getattr(data, "root", data))
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[output])


def texts_to_vectors(model: Any, options: Mapping[str, Any]) -> Run:
    embed = model.embed_alike if options["alike"] else model.embed
    return lambda data: make_numbers(
        "vector", embed([each.decode() if isinstance(each, bytes) else each for each in data])
    )


def photos_to_photos(model: Any, options: Mapping[str, Any]) -> Run:
    def upscale(photo: bytes | str) -> bytes | str:
        if isinstance(photo, bytes):
            return bytes(model.upscale(photo))
        return base64.b64encode(model.upscale(base64.b64decode(photo))).decode()

    def run(data: Elements) -> ResponseOutput:
        found = [upscale(each) for each in data]
        return ResponseOutput(name="image", shape=[len(found), 1], datatype="BYTES", data=found)

    return run


def arrays_to_arrays(model: Any, options: Mapping[str, Any]) -> Run:
    return lambda data: make_numbers("y", model.run(np.array(data, np.float32).reshape(-1, 256)))


def make_numbers(name: str, array: Any) -> ResponseOutput:
    return ResponseOutput(name=name, shape=list(array.shape), datatype="FP32", data=array.ravel().tolist())
