"""Runs loads on a server with models on the GPU: texts, images, and a soak test that measures memory growth."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.device import GpuWatch, measure_used_mib
from benchmarks.gpu.repository import MINILM, SRCNN
from benchmarks.server import ServerProcess
from penstock.client import Client
from penstock.core.tensors import Array
from penstock.experiments.load.generator import Generator
from penstock.experiments.load.load_process import LoadSpec, Window, WindowOutcome, write_messages
from penstock.experiments.load.payloads import Payload, build_column_payloads, encode

TEXTS_PER_REQUEST = 64
SIZES = (1, 64, 4, 16, 1, 32, 8, 64)  # texts of a request of the soak, one after another
WARM_UP_S = 2.0
SOAK_WINDOW_S = 5.0
TUNING_S = 10.0  # in which every thread of every worker has tried cuDNN's algorithms
CHECKED_IMAGES = 3


@dataclass(frozen=True, slots=True)
class Callers:
    protocol: str  # grpc, rest
    count: int
    processes: int  # of the load generator


@dataclass(slots=True)
class ServedRate:
    """Items per second in each round, and further measurements of the rounds."""

    rates: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # share of time in which the GPU was busy
    generator: list[float] = field(default_factory=list)  # CPU share of the load generator
    cpu_s: list[dict[str, float]] = field(
        default_factory=list
    )  # CPU seconds per second, by role of the server's processes
    refused: int = 0

    def add(self, outcome: WindowOutcome, items: int, busy: float, cpu_s: dict[str, float]) -> None:
        self.rates.append(outcome.rps * items)
        self.p50_ms.append(outcome.latencies.percentile_ms(50))
        self.p99_ms.append(outcome.latencies.percentile_ms(99))
        self.busy.append(busy)
        self.generator.append(outcome.cpu_share)
        self.cpu_s.append({role: seconds / (outcome.seconds + WARM_UP_S) for role, seconds in cpu_s.items()})
        self.refused += sum(outcome.rejected.values())

    @property
    def rate(self) -> float:
        return median(self.rates)


class Load:
    """Requests of `items` items each; each caller sends its next request when the previous one is answered."""

    def __init__(self, server: ServerProcess, folder: Path, payloads: Sequence[Payload], callers: Callers) -> None:
        file = folder / f"{callers.protocol}-{len(payloads)}-{payloads[0].model}"
        write_messages(file, encode(payloads, callers.protocol))
        target = server.http if callers.protocol == "rest" else server.grpc
        self._server = server
        self._callers = callers
        spec = LoadSpec(callers.protocol, target, str(file), callers.count)
        self._generator = Generator(spec, min(callers.processes, callers.count))

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self._generator.close()

    def warm_up(self, seconds: float) -> None:
        self._generator.run(Window(seconds, self._callers.count, 0.0, WARM_UP_S))

    def window(self, seconds: float, device: str, items: int, into: ServedRate) -> None:
        before = self._server.cpu_s()
        with GpuWatch(device) as watch:
            outcome = self._generator.run(Window(seconds, self._callers.count, 0.0, WARM_UP_S))
        after = self._server.cpu_s()
        into.add(outcome, items, watch.busy, {role: after[role] - before[role] for role in after})

    def soak(self, seconds: float, look: Callable[[WindowOutcome], None]) -> None:
        """Measure windows under one continuous load; call `look` after each."""

        def seen(outcomes: Sequence[WindowOutcome]) -> bool:
            look(outcomes[-1])
            return False

        windows = max(4, round(seconds / SOAK_WINDOW_S))
        self._generator.run_until(Window(SOAK_WINDOW_S, self._callers.count, 0.0, WARM_UP_S, windows), seen)


def make_text_payloads(texts: Sequence[str], sizes: Sequence[int] = (TEXTS_PER_REQUEST,)) -> list[Payload]:
    """Return requests that contain every text once, with `sizes` in turn. The first texts fill up the last request."""
    payloads: list[Payload] = []
    taken, endless, turns = 0, cycle(texts), cycle(sizes)
    while taken < len(texts):
        taken += (size := next(turns))
        payloads += build_column_payloads(MINILM, {"text": list(islice(endless, size))}, size)
    return payloads


def make_image_payloads(files: Sequence[bytes]) -> list[Payload]:
    return build_column_payloads(SRCNN, {"image": list(files)}, 1)


@contextmanager
def serving(models: Path, folder: Path, layout: tuple[int, int], settings: dict[str, Any]) -> Iterator[ServerProcess]:
    gateways, workers = layout
    flags = ("--gateways", str(gateways), "--workers", str(workers))
    with ServerProcess(models, folder, *flags, settings=settings) as server:
        yield server


def compute_least_cosine(server: ServerProcess, texts: Sequence[str], expected: Array) -> float:
    with Client(server.grpc) as client:
        found = np.concatenate(
            [
                client.embed(texts[start : start + TEXTS_PER_REQUEST], MINILM, 60.0)
                for start in range(0, len(texts), TEXTS_PER_REQUEST)
            ]
        )
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / norms).min())


def upscale_files(server: ServerProcess, files: Sequence[bytes]) -> list[bytes]:
    with Client(server.grpc) as client:
        return [client.upscale(file, SRCNN, 60.0) for file in files[:CHECKED_IMAGES]]


@dataclass(slots=True)
class SoakSeries:
    """Measurements of a soak test, one per window."""

    device: str
    server: ServerProcess
    rates: list[float] = field(default_factory=list)  # requests per second
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    most_ms: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)  # memory of the server's processes
    device_mib: list[float] = field(default_factory=list)
    refused: int = 0

    def look(self, outcome: WindowOutcome) -> None:
        self.rates.append(outcome.rps)
        for into, percent in ((self.p50_ms, 50), (self.p99_ms, 99), (self.most_ms, 100)):
            into.append(outcome.latencies.percentile_ms(percent))
        self.memory_mib.append(self.server.rss_bytes() / 2**20)
        self.device_mib.append(measure_used_mib(self.device))
        self.refused += sum(outcome.rejected.values())

    def as_dict(self) -> dict[str, Any]:
        names = ("rates", "p50_ms", "p99_ms", "most_ms", "memory_mib", "device_mib")
        series = {name: [round(value, 2) for value in getattr(self, name)] for name in names}
        return {"window_s": SOAK_WINDOW_S, **series, "refused": self.refused}
