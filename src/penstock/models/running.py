"""Runs requests on a loaded model in this process, without a worker."""

import queue
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

from penstock.core.errors import EngineFailed
from penstock.core.generation import GenerationStep
from penstock.core.tensors import Array, Tensor
from penstock.engines.engine_protocols import CallContext
from penstock.models.loading import LoadedModel
from penstock.tasks.base import Piece, TaskRequest
from penstock.tasks.generate.answer import GenerationAnswer

BatchArrays = dict[str, Array]


def answer(model: LoadedModel, request: TaskRequest) -> list[Tensor]:
    """Run a request, one piece at a time and so without padding, and return the answer."""
    prepared = model.task.prepare(request)
    results = [infer(model, [piece])[0] for piece in prepared.pieces]
    return model.task.finish(request, prepared, results)


def first_answers(
    model: LoadedModel, request: TaskRequest, max_answers: int, request_id: str = ""
) -> list[list[Tensor]]:
    """Run the request; return its answer, or the first `max_answers` answers of a decoupled model."""
    if model.request_mode == "generations":
        return [_generate(model, request)]
    if model.request_mode == "batches":
        return [answer(model, request)]
    task, _ = model.batching
    prepared = task.prepare(request)
    (piece,) = prepared.pieces
    stream = model.context_engine.stream(0, task.join([piece]), task.engine_outputs, CallContext(request_id=request_id))
    made = list(islice(stream, max_answers))
    cast("Any", stream).close()
    return [task.finish(request, prepared, task.split([piece], outputs)) for outputs in made]


def _generate(model: LoadedModel, request: TaskRequest) -> list[Tensor]:
    engine = model.generating_engine
    prepared = model.task.prepare(request)
    growing: GenerationAnswer = prepared.context
    steps: queue.Queue[GenerationStep] = queue.Queue()
    engine.start(steps.put)
    for number, generation in enumerate(growing.generations):
        engine.add(number, generation)
    while not growing.is_over:
        try:
            step = steps.get(timeout=model.settings.timeouts.request_s)
        except queue.Empty:
            raise EngineFailed("the model did not generate a token within timeouts.request_s") from None
        for progress in step.progress:
            if progress.failure is not None:
                raise progress.failure
            growing.add(progress.number, progress)
    return model.task.finish(request, prepared, ())


def infer(model: LoadedModel, pieces: Sequence[Piece], instance: int = 0) -> list[Sequence[Array]]:
    task, engine = model.batching
    return task.split(pieces, engine.infer(instance, task.join(pieces), task.engine_outputs))


def join(model: LoadedModel, pieces: Sequence[Piece]) -> BatchArrays:
    task, _ = model.batching
    return task.join(pieces)


def infer_arrays(model: LoadedModel, batch: BatchArrays, instance: int = 0) -> list[Array]:
    task, engine = model.batching
    return engine.infer(instance, batch, task.engine_outputs)


def prepare_all(model: LoadedModel, requests: Iterable[TaskRequest]) -> list[Piece]:
    return [piece for request in requests for piece in model.task.prepare(request).pieces]


def cut_into_batches(pieces: Iterable[Piece], max_rows: int, max_tokens: int | None) -> list[list[Piece]]:
    """Group pieces of similar length into batches, as a worker does when many pieces wait."""
    waiting = sorted(pieces, key=lambda piece: piece.length)
    if any(piece.key != waiting[0].key for piece in waiting):
        return [[piece] for piece in waiting]
    batches: list[list[Piece]] = []
    rows = 0
    for piece in waiting:
        rows += piece.rows
        if not batches or rows > max_rows or (max_tokens and rows * piece.length > max_tokens):
            batches.append([])
            rows = piece.rows
        batches[-1].append(piece)
    return batches
