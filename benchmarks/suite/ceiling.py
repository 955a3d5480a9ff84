"""The highest rate of an engine in this process: no server and no network, but with tokenizing."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock.core.settings import Instances
from penstock.core.tensors import Tensor, pack_bytes
from penstock.models.folder import read_model_folder
from penstock.models.loading import ModelFile, load_model
from penstock.models.running import cut_into_batches, infer, prepare_all
from penstock.tasks.base import Piece, TaskRequest


@dataclass(frozen=True, slots=True)
class Schedule:
    """The division of the texts into batches: sorted by length as a whole, so that padding is minimal."""

    max_tokens: int
    instances: int
    threads: int


SCHEDULES = (Schedule(256, 2, 1), Schedule(512, 2, 1), Schedule(1024, 2, 1), Schedule(512, 1, 2))


class EmbedCeiling:
    def __init__(self, model: Path, schedule: Schedule) -> None:
        folder = read_model_folder(model)
        version = folder.versions[-1]
        changes = {"engine": "onnx", "precision": "fp32", "instances": Instances(threads=schedule.threads)}
        settings = folder.settings.model_copy(update=changes)
        self._schedule = schedule
        self._model = load_model(ModelFile(folder.file(version), model / version, settings), schedule.instances)

    def run(self, texts: Sequence[str], seconds: float) -> float:
        """Return texts per second with all instances busy, over whole passes that take at least `seconds`."""
        start = time.perf_counter()
        passes = 0
        while time.perf_counter() - start < seconds:
            self._run_pass(texts)
            passes += 1
        return passes * len(texts) / (time.perf_counter() - start)

    def close(self) -> None:
        self._model.engine.close()

    def _run_pass(self, texts: Sequence[str]) -> None:
        # Tokenizing is shared out like the batches: a serial part would idle a core that a server uses.
        shares = [list(texts[i :: self._schedule.instances]) for i in range(self._schedule.instances)]
        pieces: list[list[Piece]] = [[] for _ in shares]
        _run_in_threads(lambda i: pieces[i].extend(self._tokenize(shares[i])), len(shares))
        max_rows = self._model.settings.batching.max_rows
        batches = cut_into_batches((piece for share in pieces for piece in share), max_rows, self._schedule.max_tokens)
        lock = threading.Lock()

        def work(instance: int) -> None:
            while True:
                with lock:
                    if not batches:
                        return
                    batch = batches.pop()
                infer(self._model, batch, instance)

        _run_in_threads(work, self._schedule.instances)

    def _tokenize(self, texts: Sequence[str]) -> list[Piece]:
        tensors = (Tensor("text", "BYTES", (1,), pack_bytes([text])) for text in texts)
        return prepare_all(self._model, (TaskRequest([tensor], []) for tensor in tensors))


def find_best_schedule(model: Path, texts: Sequence[str], seconds: float, say: Callable[[str], None]) -> Schedule:
    """Return the fastest schedule, because a ceiling must not be beaten by another schedule."""
    rates: dict[Schedule, float] = {}
    for schedule in SCHEDULES:
        rates[schedule] = measure_warm_rate(model, schedule, texts, seconds)
        say(f"  ceiling with {schedule}: {rates[schedule]:.1f} texts/s")
    return max(rates, key=lambda schedule: rates[schedule])


def measure_warm_rate(model: Path, schedule: Schedule, texts: Sequence[str], seconds: float) -> float:
    ceiling = EmbedCeiling(model, schedule)
    ceiling.run(texts[:64], 0.5)
    rate = ceiling.run(texts, seconds)
    ceiling.close()
    return rate


def _run_in_threads(work: Callable[[int], None], count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
