"""Calls to task processes, compared with the worker's own task."""

from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np

from penstock.core.config import Limits
from penstock.core.settings import Batching
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, TensorSpec, pack_bytes
from penstock.models.building import TaskSpec, build_task
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import Prepared, Task, TaskRequest
from penstock.worker.offload.task_pool import TaskPool, TaskProcesses

PLANE = (-1, 1, -1, -1)
NOWHERE = Path("nowhere")
UPSCALE = TaskSpec(
    NOWHERE,
    ModelSettings(task="upscale", batching=Batching(max_rows=8)),
    Signature((TensorSpec("x", "FP32", PLANE),), (TensorSpec("y", "FP32", PLANE),), "onnx", "fp32"),
    Limits(),
)


def files(pid: int) -> int:
    """Return the number of open sockets and arenas."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in between
            count += str(link.readlink()).startswith(("socket:", "/memfd:penstock-arena"))
    return count


async def opened(processes: TaskProcesses, spec: TaskSpec) -> tuple[TaskPool, Task]:
    task = cast("Task", build_task(spec))
    return await processes.open(spec), task


def images(*files: bytes) -> TaskRequest:
    return TaskRequest([Tensor("image", "BYTES", (len(files),), pack_bytes(files))], [])


def run(task: Task, prepared: Prepared) -> list[list[Array]]:
    """Run the pieces like an engine that returns its input."""
    return [list(task.split([piece], list(task.join([piece]).values()))[0]) for piece in prepared.pieces]


def locally(task: Task, request: TaskRequest) -> list[Tensor]:
    prepared = task.prepare(request)
    return task.finish(request, prepared, run(task, prepared))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return [(t.name, t.datatype, t.shape, bytes(t.data)) for t in found] == [
        (t.name, t.datatype, t.shape, bytes(t.data)) for t in expected
    ]


def check_pieces(found: Prepared, expected: Prepared) -> None:
    assert found.parameters == expected.parameters
    assert [(p.rows, p.length, p.key) for p in found.pieces] == [(p.rows, p.length, p.key) for p in expected.pieces]
    for ours, theirs in zip(found.pieces, expected.pieces, strict=True):
        assert list(ours.arrays) == list(theirs.arrays)
        for name, array in theirs.arrays.items():
            assert ours.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(ours.arrays[name], array)
