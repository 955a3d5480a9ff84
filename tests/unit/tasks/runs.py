"""Runs a task with an engine, without a worker."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from penstock.core.config import Limits
from penstock.core.tensors import Array, Tensor, pack_bytes, to_array
from penstock.engines.engine_protocols import Engine
from penstock.models.building import TaskSpec, build_engine, build_task
from penstock.models.folder import read_model_folder
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.base import Prepared, Task, TaskRequest


class Loaded:
    def __init__(self, folder: Path, settings: ModelSettings, limits: Limits | None = None) -> None:
        """Load the version in `folder`."""
        self.engine = cast("Engine", build_engine(folder / settings.file, settings, 1))
        self.signature = self.engine.load()
        self.task = cast("Task", build_task(TaskSpec(folder, settings, self.signature, limits or Limits())))

    def run(self, request: TaskRequest) -> dict[str, Any]:
        return self.run_together(request)[0]

    def run_together(self, *requests: TaskRequest) -> list[dict[str, Any]]:
        """Run all pieces of all requests in one batch."""
        prepared = [self.task.prepare(request) for request in requests]
        pieces = [piece for each in prepared for piece in each.pieces]
        outputs = self.engine.infer(0, self.task.join(pieces), self.task.engine_outputs)
        results = iter(self.task.split(pieces, outputs))
        return [
            self._finish(request, each, [next(results) for _ in each.pieces])
            for request, each in zip(requests, prepared, strict=True)
        ]

    def _finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> dict[str, Any]:
        return {tensor.name: to_array(tensor) for tensor in self.task.finish(request, prepared, results)}


def load_model(model: Path) -> Loaded:
    return Loaded(model / "1", read_model_folder(model).settings)


def column(name: str, elements: Sequence[str | bytes], *shape: int) -> Tensor:
    return Tensor(name, "BYTES", shape or (len(elements), 1), pack_bytes(elements))
