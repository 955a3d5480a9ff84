"""How near a served model's answers are to those of its own file in FP32, on real texts and photographs."""

from pathlib import Path

import numpy as np

from penstock.client import Client
from penstock.core.config import Limits
from penstock.core.tensors import Array, Tensor, pack_bytes, unpack_bytes
from penstock.engines.base import EngineSpec
from penstock.engines.onnx.engine import OnnxEngine
from penstock.experiments.results import Accuracy
from penstock.models.convert.publish import original_of
from penstock.models.convert.ranks import cosines, psnr_db
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import mixed
from penstock.models.settings import ModelFolder
from penstock.tasks.base import Task, TaskRequest
from penstock.tasks.embed import EmbedTask
from penstock.tasks.images import decode, read_header
from penstock.tasks.upscale import UpscaleTask

TEXTS = 64
PHOTOS = 3
SEED = 7


class Reference:
    """FP32 answers of each model, made once in this process and one at a time, so that nothing is padded."""

    def __init__(self) -> None:
        self._answers: dict[Path, Array | list[bytes]] = {}

    def compare(self, folder: ModelFolder, address: str) -> Accuracy | None:
        """None for models whose answers have no measure."""
        task = folder.settings.task
        if task == "embed":
            with Client(address) as client:
                return cosine(self._embeddings(folder), client.embed(mixed(TEXTS, SEED), folder.name))
        if task == "upscale":
            with Client(address) as client:
                served = [client.upscale(photo, folder.name) for photo in photos()[:PHOTOS]]
            return psnr(self._images(folder), served)
        return None

    def _embeddings(self, folder: ModelFolder) -> Array:
        if folder.path not in self._answers:
            self._answers[folder.path] = embed_in_process(folder, _file(folder), mixed(TEXTS, SEED))
        found = self._answers[folder.path]
        assert isinstance(found, np.ndarray)
        return found

    def _images(self, folder: ModelFolder) -> list[bytes]:
        if folder.path not in self._answers:
            self._answers[folder.path] = _upscale_in_process(folder)
        found = self._answers[folder.path]
        assert isinstance(found, list)
        return found


def cosine(expected: Array, found: Array) -> Accuracy:
    """Between each two vectors."""
    values = cosines(expected, found)
    return Accuracy(
        measure="cosine", mean=round(float(values.mean()), 6), lowest=round(float(values.min()), 6), samples=len(values)
    )


def psnr(expected: list[bytes], found: list[bytes]) -> Accuracy:
    """Between each two images, in dB."""
    values = [psnr_db(_pixels(one), _pixels(other)) for one, other in zip(expected, found, strict=True)]
    return Accuracy(
        measure="PSNR dB", mean=round(float(np.mean(values)), 2), lowest=round(min(values), 2), samples=len(values)
    )


def embed_in_process(folder: ModelFolder, file: Path, texts: list[str]) -> Array:
    """One text at a time on ONNX Runtime; `file` may be another precision of the model's own."""
    engine = OnnxEngine(EngineSpec(file, "fp32", 1, 1))
    signature = engine.load()
    settings = folder.settings
    task = EmbedTask(_file(folder).parent, settings.embed, settings.batching.max_rows, signature, Limits().max_tokens)
    rows = [_run(task, engine, Tensor("text", "BYTES", (1,), pack_bytes([text]))) for text in texts]
    engine.close()
    return np.stack([np.frombuffer(row.data, np.float32) for row in rows])


def _upscale_in_process(folder: ModelFolder) -> list[bytes]:
    engine = OnnxEngine(EngineSpec(_file(folder), "fp32", 1, 1))
    signature = engine.load()
    task = UpscaleTask(folder.settings.upscale, signature, folder.settings.batching.max_rows)
    found = [_run(task, engine, Tensor("image", "BYTES", (1, 1), pack_bytes([photo]))) for photo in photos()[:PHOTOS]]
    engine.close()
    return [unpack_bytes(tensor)[0] for tensor in found]


def _run(task: Task, engine: OnnxEngine, tensor: Tensor) -> Tensor:
    request = TaskRequest([tensor], [])
    prepared = task.prepare(request)
    results = [task.split([p], engine.infer(0, task.join([p]), task.engine_outputs))[0] for p in prepared.pieces]
    return task.finish(request, prepared, results)[0]


def _file(folder: ModelFolder) -> Path:
    """The newest version's; where that was made by quantizing another, the other's."""
    return folder.file(original_of(folder.path, folder.versions[-1]))


def _pixels(image: bytes) -> Array:
    return np.asarray(decode(read_header(image)).image)
