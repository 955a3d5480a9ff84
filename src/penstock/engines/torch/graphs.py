"""Rows of token ids on a GPU: a CUDA graph for each shape bucket, captured as the model is loaded.

A batch is one copy in, one launch and one copy out, each queued behind those of the batch before it on one stream: so
all graphs share their memory and the buffers on the device, and the instances fill and read buffers of their own while
another's batch runs.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch

from penstock.core.signature import PADDING
from penstock.core.tensors import Array
from penstock.engines.torch.buckets import Shape, ShapeBuckets
from penstock.engines.torch.model import TorchModel, brief

MOST_CAPTURE_S = 60.0
LEAST_FREE = 0.1  # of the device's memory: with less than that no further graph is captured
AWAKE_TOKENS = 4096  # who waits for so few stays awake for them

log = structlog.get_logger()
_CAPTURE = threading.Lock()  # CUDA can capture one graph at a time in a process


def unpack(rows: Any, count: int) -> list[Any]:
    """The model's inputs (ids, mask and types, the first `count`) from int32 [1 or 2, rows, length] on its device."""
    ids = rows[0]
    return [ids.clamp(min=0).long(), (ids >= 0).long(), *(each.long() for each in rows[1:])][:count]


def fill(target: Array, rows: Sequence[Array]) -> None:
    """Lays ids and types, [n, length] each, into a larger [2, rows, length]. What is beside and below them is padding;
    but a row of padding alone would have nothing to attend to, and has one token."""
    count, length = rows[0].shape
    for place, each in enumerate(rows):
        target[place, :count, :length] = each
    filler = (PADDING, 0)
    for place in range(len(target)):
        if place >= len(rows):
            target[place] = 0
        else:
            target[place, :count, length:] = filler[place]
            target[place, count:] = filler[place]
    target[0, count:, 0] = 0


@dataclass(slots=True)
class _HostBuffers:
    """Pinned, so that the device copies from and to them by itself."""

    given: Any  # int32
    answer: Any  # as the model's output
    asleep: Any  # events: who waits for the one gives up its core
    awake: Any

    @classmethod
    def make(cls, given: int, answer: Any) -> "_HostBuffers":
        return cls(
            torch.zeros(given, dtype=torch.int32, pin_memory=True),
            torch.zeros(answer.shape, dtype=answer.dtype, pin_memory=True),
            torch.cuda.Event(blocking=True),
            torch.cuda.Event(),
        )


class TokenGraphs:
    """Of a model that takes ids, mask and maybe types, and gives one row of numbers for each."""

    def __init__(self, model: TorchModel, device: Any) -> None:
        self._call = model.call
        self._inputs = len(model.inputs)
        self._planes = max(1, self._inputs - 1)  # ids, which tell the mask, and types
        self._device = device
        self._graphs: dict[Shape, Any] = {}
        self._buckets = ShapeBuckets(0, 0)
        self._stream: Any = None
        self._given: Any = None  # on the device, as large as the largest shape
        self._answer: Any = None
        self._launching = threading.Lock()
        self._free: list[_HostBuffers] = []  # as many as were ever in use at once

    def capture(self, buckets: ShapeBuckets) -> None:
        """What cannot be captured, or not in time, runs without a graph."""
        self._buckets = buckets
        shapes = buckets.shapes()
        started = time.monotonic()
        with _CAPTURE, torch.inference_mode(), torch.cuda.device(self._device):
            free_before = torch.cuda.mem_get_info(self._device)[0]
            self._stream = torch.cuda.Stream(self._device)
            reason = self._capture_all(shapes, started + MOST_CAPTURE_S) if shapes else ""
            torch.cuda.empty_cache()
            taken = free_before - torch.cuda.mem_get_info(self._device)[0]
        tell = log.warning if reason else log.info
        tell(
            "graphs_captured",
            graphs=len(self._graphs),
            of=len(shapes),
            seconds=round(time.monotonic() - started, 1),
            device_mb=taken >> 20,
            **({"reason": reason} if reason else {}),
        )

    def _capture_all(self, shapes: Sequence[Shape], end: float) -> str:
        """Why not all were; empty: they were."""
        pool = torch.cuda.graph_pool_handle()
        largest = max(rows * length for rows, length in shapes)
        most_rows = max(rows for rows, _ in shapes)
        try:
            with torch.cuda.stream(self._stream):
                self._given = torch.zeros(self._planes * largest, dtype=torch.int32, device=self._device)
                # Else a model that finds nothing padded leaves the mask out, and other kernels would be loaded.
                self._given[1] = PADDING
                found = self._compute(shapes[-1])
                self._answer = torch.zeros((most_rows, found.shape[1]), dtype=found.dtype, device=self._device)
                for shape in shapes:
                    free, total = torch.cuda.mem_get_info(self._device)
                    if free < LEAST_FREE * total:
                        return "the device's memory is nearly full"
                    if time.monotonic() > end:
                        return f"{MOST_CAPTURE_S:g} s were not enough"
                    self._graphs[shape] = self._capture_one(shape, pool)
        except RuntimeError as error:  # out of memory, or what a graph cannot hold
            return brief(error)
        return ""

    def _capture_one(self, shape: Shape, pool: Any) -> Any:
        self._compute(shape)  # kernels are loaded, and chosen, by their first run
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another model of this process may allocate memory meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._answer[: shape[0]].copy_(self._compute(shape))
        finally:
            graph.capture_end()
        return graph

    def _compute(self, shape: Shape) -> Any:
        rows, length = shape
        given = self._given[: self._planes * rows * length].view(self._planes, rows, length)
        return self._call(unpack(given, self._inputs))

    def run(self, given: Sequence[Array]) -> Array | None:
        """`given` are ids and, of pairs, types. None: there is no graph for this shape."""
        rows, length = given[0].shape
        shape = self._buckets.fit(rows, length)
        graph = self._graphs.get(shape)
        if graph is None:
            return None
        host = self._take_host()
        size = self._planes * shape[0] * shape[1]
        fill(host.given[:size].view(self._planes, *shape).numpy(), given)
        done = host.awake if size <= AWAKE_TOKENS else host.asleep
        # What is made in inference mode can be written to in inference mode alone.
        with self._launching, torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._given[:size].copy_(host.given[:size], non_blocking=True)
            graph.replay()
            host.answer[:rows].copy_(self._answer[:rows], non_blocking=True)
            done.record()
        done.synchronize()
        found: Array = host.answer[:rows].numpy().copy()
        self._free.append(host)
        return found

    def _take_host(self) -> _HostBuffers:
        try:
            return self._free.pop()
        except IndexError:
            with torch.cuda.device(self._device):
                return _HostBuffers.make(len(self._given), self._answer)


def on_device(given: Sequence[Array], count: int, device: Any) -> list[Any]:
    """The model's inputs of such rows, without a graph."""
    rows = np.zeros((max(1, count - 1), *given[0].shape), np.int32)
    fill(rows, given)
    return unpack(torch.from_numpy(rows).to(device), count)
