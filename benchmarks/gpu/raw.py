"""Measures the highest rate of the GPU in this process, with inputs and outputs that stay in its memory."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu.repository import MAX_LENGTH, choose_precision
from penstock.core.tensors import Array
from penstock.engines.engine_options import TorchOptions
from penstock.engines.torch.torch_devices import DTYPES, choose_target
from penstock.engines.torch.torch_files import open_file
from penstock.tasks.images.png import encode_png
from penstock.tasks.text import TextTokenizer

TEXT_BATCHES = (128, 256, 512, 1024, 2048)
IMAGE_BATCHES = (1, 2, 4, 8)
REFERENCE_BATCH = 32
CODEC_RUNS = 8

Say = Callable[[str], None]


@dataclass(slots=True)
class RawForward:
    """Variants of one computation. The fastest variant is chosen once, and then measured in turns."""

    device: str
    items: int  # items of a pass
    ways: dict[str, Callable[[], None]]  # functions that run a pass, by name of the variant
    rates: dict[str, float] = field(default_factory=dict)

    def choose(self, seconds: float, say: Say) -> None:
        for name in self.ways:
            self.rates[name] = self._measure_rate(name, seconds)
            say(f"  bare, {name}: {self.rates[name]:,.0f} a second")

    @property
    def best(self) -> str:
        return max(self.rates, key=self.rates.__getitem__)

    def run(self, seconds: float) -> float:
        return self._measure_rate(self.best, seconds)

    def _measure_rate(self, name: str, seconds: float) -> float:
        way = self.ways[name]
        way()  # first run to warm up
        start, passes = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            way()
            passes += 1
        return passes * self.items / (time.perf_counter() - start)


def measure_bare_text(folder: Path, device: str, texts: Sequence[str]) -> RawForward:
    """Measure texts sorted by length in batches of each size, launched one by one and, on CUDA, as graphs."""
    target = choose_target(device, choose_precision(device))
    model = open_file(folder / "modules.json", TorchOptions(), target)
    rows = sorted(tokenize_texts(folder, texts), key=len)
    ways: dict[str, Callable[[], None]] = {}
    for size in TEXT_BATCHES:
        batches = [
            _make_inputs(rows[at : at + size], len(model.inputs), target.device) for at in range(0, len(rows), size)
        ]
        runs: list[Callable[[], Any]] = [lambda batch=batch: model.forward(batch) for batch in batches]  # type: ignore[misc]
        ways[f"batches of {size}"] = _make_pass(runs, device)
        if target.device_kind == "cuda":
            ways[f"batches of {size}, as graphs"] = _make_pass([_capture_graph(run) for run in runs], device)
    return RawForward(device, len(rows), ways)


def measure_bare_images(file: Path, device: str, width: int, height: int) -> RawForward:
    """Measure the network on luminance planes of the answer's size."""
    target = choose_target(device, "auto")
    torch.backends.cudnn.benchmark = True
    network = open_file(file, TorchOptions(), target).module
    network.to(dtype=DTYPES[choose_precision(device)], memory_format=torch.channels_last)
    sizes = IMAGE_BATCHES if target.device_kind == "cuda" else IMAGE_BATCHES[:1]
    most = max(sizes)
    ways = {}
    for size in sizes:
        batch = torch.rand((size, 1, height, width), device=target.device, dtype=DTYPES[choose_precision(device)])
        runs = [lambda batch=batch: network(batch)] * (most // size)
        ways[f"batches of {size}"] = _make_pass(runs, device)
    return RawForward(device, most, ways)


def measure_codec_cpu_s(files: Sequence[bytes], answers: Sequence[bytes]) -> float:
    """Return the CPU seconds per image for decoding the request and encoding the answer."""
    planes = [np.asarray(Image.open(BytesIO(answer)).convert("RGB")) for answer in answers]
    start = time.process_time()
    for _ in range(CODEC_RUNS):
        for file in files:
            Image.open(BytesIO(file)).load()
        for plane in planes:
            encode_png((plane.shape[1], plane.shape[0]), [plane], None)
    return (time.process_time() - start) / CODEC_RUNS / len(files)


def compute_cpu_vectors(folder: Path, texts: Sequence[str]) -> Array:
    """Return the vectors of the same weights on the CPU in FP32, in the order of the texts."""
    target = choose_target("cpu", "fp32")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = open_file(folder / "modules.json", TorchOptions(), target)
    ids = tokenize_texts(folder, texts)
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    found: list[Array] = [np.empty(0)] * len(ids)
    with torch.inference_mode():
        for start in range(0, len(order), REFERENCE_BATCH):
            chosen = order[start : start + REFERENCE_BATCH]
            answer = model.forward(_make_inputs([ids[index] for index in chosen], len(model.inputs), target.device))
            for index, vector in zip(chosen, answer.numpy(), strict=True):
                found[index] = vector
    return np.stack(found)


def tokenize_texts(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    return list(TextTokenizer(folder / "tokenizer.json", MAX_LENGTH).encode(texts))


def _make_inputs(rows: Sequence[Sequence[int]], count: int, device: Any) -> list[Any]:
    """Return ids, mask and, if the model takes three inputs, types."""
    arrays = np.zeros((count, len(rows), max(map(len, rows))), np.int64)
    for row, ids in enumerate(rows):
        arrays[0, row, : len(ids)] = ids
        arrays[1, row, : len(ids)] = 1
    return list(torch.from_numpy(arrays).to(device))


def _make_pass(runs: Sequence[Callable[[], Any]], device: str) -> Callable[[], None]:
    def run_all() -> None:
        with torch.inference_mode():
            for run in runs:
                run()
        if device != "cpu":
            torch.cuda.synchronize()

    return run_all


def _capture_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            kept = run()

    def replay(kept: Any = kept) -> None:
        graph.replay()

    return replay
