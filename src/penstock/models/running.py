"""Requests through a loaded model in this process: prepare, join, infer, split, finish."""

import queue
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

from penstock.core.errors import EngineFailed
from penstock.core.generation import GenerationStep
from penstock.core.tensors import Array, Tensor
from penstock.engines.base import CallContext, ContextEngine, GeneratingEngine
from penstock.models.loading import LoadedModel
from penstock.tasks.base import Piece, TaskRequest
from penstock.tasks.generate.answer import GenerationAnswer

BatchArrays = dict[str, Array]


def answer(model: LoadedModel, request: TaskRequest) -> list[Tensor]:
    """Runs the request piece by piece, so that nothing is padded."""
    prepared = model.task.prepare(request)
    results = [infer(model, [piece])[0] for piece in prepared.pieces]
    return model.task.finish(request, prepared, results)


def first_answers(model: LoadedModel, request: TaskRequest, most: int, request_id: str = "") -> list[list[Tensor]]:
    """One answer, or the first ones of a model that may give many."""
    engine, task = model.engine, model.task
    if isinstance(engine, GeneratingEngine):
        return [_generate(model, engine, request)]
    if not isinstance(engine, ContextEngine):
        return [answer(model, request)]
    prepared = task.prepare(request)
    (piece,) = prepared.pieces
    stream = engine.stream(0, task.join([piece]), task.engine_outputs, CallContext(request_id=request_id))
    made = list(islice(stream, most))
    cast("Any", stream).close()
    return [task.finish(request, prepared, task.split([piece], outputs)) for outputs in made]


def _generate(model: LoadedModel, engine: GeneratingEngine, request: TaskRequest) -> list[Tensor]:
    prepared = model.task.prepare(request)
    growing: GenerationAnswer = prepared.context
    told: queue.Queue[GenerationStep] = queue.Queue()
    engine.start(told.put)
    for number, generation in enumerate(growing.generations):
        engine.add(number, generation)
    while not growing.is_over:
        try:
            step = told.get(timeout=model.settings.timeouts.request_s)
        except queue.Empty:
            raise EngineFailed("the model has made no token within timeouts.request_s") from None
        for progress in step.progress:
            if progress.failure is not None:
                raise progress.failure
            growing.add(progress.number, progress)
    return model.task.finish(request, prepared, ())


def infer(model: LoadedModel, pieces: Sequence[Piece], instance: int = 0) -> list[Sequence[Array]]:
    """Runs the pieces as one batch and returns the outputs of each."""
    return model.task.split(pieces, infer_arrays(model, model.task.join(pieces), instance))


def infer_arrays(model: LoadedModel, batch: BatchArrays, instance: int = 0) -> list[Array]:
    return model.engine.infer(instance, batch, model.task.engine_outputs)


def prepare_all(model: LoadedModel, requests: Iterable[TaskRequest]) -> list[Piece]:
    return [piece for request in requests for piece in model.task.prepare(request).pieces]


def cut(pieces: Iterable[Piece], max_rows: int, max_tokens: int | None) -> list[list[Piece]]:
    """Batches as a worker with all of the pieces waiting would make them: like lengths together."""
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
