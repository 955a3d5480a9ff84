"""Runs rows of token ids on a GPU with CUDA graphs, one per shape bucket, captured while the model is loaded.

A batch needs one copy to the device, one launch and one copy back. All batches use the same stream, one after the
other, so that all graphs can share their memory and the buffers on the device. Each instance has host buffers of its
own, which it fills and reads while the GPU runs another instance's batch.
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
from penstock.engines.torch.shape_buckets import Shape, ShapeBuckets
from penstock.engines.torch.torch_model import TorchModel, brief_message

MOST_CAPTURE_S = 60.0
LEAST_FREE = 0.1  # share of the device's memory that must be free to capture one more graph
AWAKE_TOKENS = 4096  # a thread that waits for at most this many tokens spins instead of sleeping

log = structlog.get_logger()
_CAPTURE = threading.Lock()  # CUDA captures only one graph at a time in a process


def unpack(rows: Any, count: int) -> list[Any]:
    """Return ids, mask and types (the first `count` of them), given an int32 tensor of ids and possibly types."""
    ids = rows[0]
    return [ids.clamp(min=0).long(), (ids >= 0).long(), *(each.long() for each in rows[1:])][:count]


def fill_padded(target: Array, rows: Sequence[Array]) -> None:
    """Copy ids and types, each [n, length], into a larger array [2, rows, length], and pad them.

    A row without tokens gets one token, because attention needs at least one.
    """
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
    """Pinned buffers in main memory, which the GPU reads and writes while the CPU runs other code."""

    input: Any  # int32
    answer: Any  # of the type of the model's output
    sleeping_event: Any  # event for which a thread waits asleep
    spinning_event: Any  # event for which a thread waits spinning

    @classmethod
    def make(cls, input_size: int, answer: Any) -> "_HostBuffers":
        return cls(
            torch.zeros(input_size, dtype=torch.int32, pin_memory=True),
            torch.zeros(answer.shape, dtype=answer.dtype, pin_memory=True),
            torch.cuda.Event(blocking=True),
            torch.cuda.Event(),
        )


class TokenGraphs:
    """Captures and runs CUDA graphs of a model that takes token ids, mask and possibly types, and returns vectors."""

    def __init__(self, model: TorchModel, device: Any) -> None:
        self._forward = model.forward
        self._inputs = len(model.inputs)
        self._planes = max(1, self._inputs - 1)  # ids, which also define the mask, and types
        self._device = device
        self._graphs: dict[Shape, Any] = {}
        self._buckets = ShapeBuckets(0, 0)
        self._stream: Any = None
        self._input: Any = None  # on the device, as large as the largest shape
        self._answer: Any = None
        self._launching = threading.Lock()
        self._free_buffers: list[_HostBuffers] = []  # buffers that no thread uses now

    def capture(self, buckets: ShapeBuckets) -> None:
        """Capture a graph per shape. Shapes whose capture fails or takes too long run without a graph."""
        self._buckets = buckets
        shapes = buckets.shapes()
        started = time.monotonic()
        with _CAPTURE, torch.inference_mode(), torch.cuda.device(self._device):
            free_before = torch.cuda.mem_get_info(self._device)[0]
            self._stream = torch.cuda.Stream(self._device)
            reason = self._capture_all(shapes, started + MOST_CAPTURE_S) if shapes else ""
            torch.cuda.empty_cache()
            taken = free_before - torch.cuda.mem_get_info(self._device)[0]
        write = log.warning if reason else log.info
        write(
            "graphs_captured",
            graphs=len(self._graphs),
            of=len(shapes),
            seconds=round(time.monotonic() - started, 1),
            device_mb=taken >> 20,
            **({"reason": reason} if reason else {}),
        )

    def _capture_all(self, shapes: Sequence[Shape], end: float) -> str:
        """Capture the graphs until the time `end`; return why some are missing, or an empty text."""
        pool = torch.cuda.graph_pool_handle()
        largest = max(rows * length for rows, length in shapes)
        most_rows = max(rows for rows, _ in shapes)
        try:
            with torch.cuda.stream(self._stream):
                self._input = torch.zeros(self._planes * largest, dtype=torch.int32, device=self._device)
                # The capture needs some padding: without it, a model may skip the mask and use other kernels.
                self._input[1] = PADDING
                found = self._compute_rows(shapes[-1])
                self._answer = torch.zeros((most_rows, found.shape[1]), dtype=found.dtype, device=self._device)
                for shape in shapes:
                    free, total = torch.cuda.mem_get_info(self._device)
                    if free < LEAST_FREE * total:
                        return "the device's memory is nearly full"
                    if time.monotonic() > end:
                        return f"{MOST_CAPTURE_S:g} s were not enough"
                    self._graphs[shape] = self._capture_one(shape, pool)
        except RuntimeError as error:  # out of memory, or an operation that a graph does not support
            return brief_message(error)
        return ""

    def _capture_one(self, shape: Shape, pool: Any) -> Any:
        self._compute_rows(shape)  # the first run loads and selects the kernels
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local, because another model in this process may allocate memory meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._answer[: shape[0]].copy_(self._compute_rows(shape))
        finally:
            graph.capture_end()
        return graph

    def _compute_rows(self, shape: Shape) -> Any:
        rows, length = shape
        given = self._input[: self._planes * rows * length].view(self._planes, rows, length)
        return self._forward(unpack(given, self._inputs))

    def run(self, rows_of_inputs: Sequence[Array]) -> Array | None:
        """Run the model on ids and possibly types; return None if there is no graph for their shape."""
        rows, length = rows_of_inputs[0].shape
        shape = self._buckets.fit(rows, length)
        graph = self._graphs.get(shape)
        if graph is None:
            return None
        host = self._take_host_buffers()
        size = self._planes * shape[0] * shape[1]
        fill_padded(host.input[:size].view(self._planes, *shape).numpy(), rows_of_inputs)
        done = host.spinning_event if size <= AWAKE_TOKENS else host.sleeping_event
        # Inference mode, because tensors that were created in this mode can be written only in this mode.
        with self._launching, torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._input[:size].copy_(host.input[:size], non_blocking=True)
            graph.replay()
            host.answer[:rows].copy_(self._answer[:rows], non_blocking=True)
            done.record()
        done.synchronize()
        found: Array = host.answer[:rows].numpy().copy()
        self._free_buffers.append(host)
        return found

    def _take_host_buffers(self) -> _HostBuffers:
        try:
            return self._free_buffers.pop()
        except IndexError:
            with torch.cuda.device(self._device):
                return _HostBuffers.make(len(self._input), self._answer)


def copy_to_device(rows_of_inputs: Sequence[Array], count: int, device: Any) -> list[Any]:
    """Copy rows of ids and possibly types to the device, and return the model's inputs, for a run without a graph."""
    rows = np.zeros((max(1, count - 1), *rows_of_inputs[0].shape), np.int32)
    fill_padded(rows, rows_of_inputs)
    return unpack(torch.from_numpy(rows).to(device), count)
