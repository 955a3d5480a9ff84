"""The most that an engine gives in this process: no server, no wire, tokenizing included."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.config import Limits
from penstock.core.tensors import Tensor, pack_bytes
from penstock.engines.base import EngineSpec
from penstock.engines.onnx.engine import OnnxEngine
from penstock.models.folder import read_model_folder
from penstock.tasks.base import Piece, TaskRequest
from penstock.tasks.embed import EmbedTask


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the texts are cut into batches: the whole set sorted by length, so that nothing could pad less."""

    max_tokens: int
    instances: int
    threads: int


class EmbedCeiling:
    def __init__(self, model: Path, schedule: Schedule) -> None:
        folder = read_model_folder(model)
        version = folder.versions[-1]
        spec = EngineSpec(folder.file(version), "fp32", schedule.threads, schedule.instances)
        self._schedule = schedule
        self._engine = OnnxEngine(spec)
        signature = self._engine.load()
        settings = folder.settings
        self._max_rows = settings.batching.max_rows
        self._task = EmbedTask(model / version, settings.embed, self._max_rows, signature, Limits().max_tokens)

    def run(self, texts: Sequence[str], seconds: float) -> float:
        """Texts a second, all instances busy, over whole passes of the texts that fill at least `seconds`."""
        start = time.perf_counter()
        passes = 0
        while time.perf_counter() - start < seconds:
            self._run_pass(texts)
            passes += 1
        return passes * len(texts) / (time.perf_counter() - start)

    def close(self) -> None:
        self._engine.close()

    def _run_pass(self, texts: Sequence[str]) -> None:
        # Tokenizing is shared out like the batches: a serial part would idle a core that a server uses.
        shares = [list(texts[i :: self._schedule.instances]) for i in range(self._schedule.instances)]
        pieces: list[list[Piece]] = [[] for _ in shares]
        _in_threads(lambda i: pieces[i].extend(self._tokenize(shares[i])), len(shares))
        batches = self._cut(sorted((p for share in pieces for p in share), key=lambda piece: piece.length))
        lock = threading.Lock()

        def work(instance: int) -> None:
            while True:
                with lock:
                    if not batches:
                        return
                    batch = batches.pop()
                outputs = self._engine.infer(instance, self._task.join(batch), self._task.engine_outputs)
                self._task.split(batch, outputs)

        _in_threads(work, self._schedule.instances)

    def _tokenize(self, texts: Sequence[str]) -> list[Piece]:
        pieces = []
        for text in texts:
            tensor = Tensor("text", "BYTES", (1,), pack_bytes([text]))
            pieces += self._task.prepare(TaskRequest([tensor], [])).pieces
        return pieces

    def _cut(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        batches: list[list[Piece]] = []
        batch: list[Piece] = []
        for piece in pieces:
            is_full = (len(batch) + 1) * piece.length > self._schedule.max_tokens or len(batch) == self._max_rows
            if batch and is_full:
                batches.append(batch)
                batch = []
            batch.append(piece)
        return [*batches, batch] if batch else batches


def _in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
