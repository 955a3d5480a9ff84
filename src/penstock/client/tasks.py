"""Requests for the built-in tasks, and their answers as scores, ranks and labels, for both clients."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict, TypeGuard

import numpy as np

from penstock.client.messages import ModelSignature, make_bytes_column, pick_output
from penstock.core.errors import InternalError, InvalidRequest, InvalidTensor
from penstock.core.ranking import compute_cosines, rank_best_first
from penstock.core.requests import Parameter
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array

Items = Iterable[bytes] | Iterable[str] | Array
Labels = list[tuple[str, float]]
SCORE, EMBED = "score", "embed"


class ImageOptions(TypedDict, total=False):
    """Options of the resulting image, as keyword arguments; None: the model's default."""

    format: str | None  # png, jpeg or webp
    quality: int | None  # for jpeg and webp, 1 to 100
    resolution: str | None  # a factor (2x), a height (1080p, 4k) or a size (1920x1080)
    mode: str | None  # upscale or denoise


@dataclass(frozen=True, slots=True)
class Pairs:
    queries: list[str]  # one query for all passages, or one query for each passage
    passages: list[str]


def make_image_parameters(options: ImageOptions) -> dict[str, Parameter]:
    return {name: value for name, value in options.items() if isinstance(value, int | str)}


async def split_into_chunks(texts: Iterable[str] | AsyncIterable[str], size: int) -> AsyncIterator[list[str]]:
    """Yield the texts in lists of `size`. Does not wait unless `texts` is an asynchronous iterable."""
    if size < 1:
        raise InvalidRequest(f"batch is {size}: it must be at least 1")
    chunk: list[str] = []
    async for text in _as_async(texts):
        if not isinstance(text, str):
            raise InvalidRequest(f"the texts must be str, but one is a {type(text).__name__}")
        chunk.append(text)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _as_async(texts: Iterable[str] | AsyncIterable[str]) -> AsyncIterator[str]:
    if isinstance(texts, AsyncIterable):
        async for text in texts:
            yield text
    else:
        for text in texts:
            yield text


def read_pairs(query: str | Iterable[str], passages: Iterable[str]) -> Pairs:
    if isinstance(passages, str):
        raise InvalidRequest("the passages must be a list of texts, not one text: [text]")
    pairs = Pairs([query] if isinstance(query, str) else list(query), list(passages))
    if not pairs.passages:
        raise InvalidRequest("there are no passages: give at least one passage")
    if len(pairs.queries) not in (1, len(pairs.passages)):
        raise InvalidRequest(
            f"{len(pairs.queries)} queries for {len(pairs.passages)} passages: give one query for all passages, or one "
            "query for each passage"
        )
    return pairs


def make_score_inputs(pairs: Pairs, task: str, model: str) -> dict[str, Array]:
    if task == SCORE:
        return {"query": make_bytes_column(pairs.queries), "passage": make_bytes_column(pairs.passages)}
    if task == EMBED:
        return {"text": make_bytes_column([*pairs.queries, *pairs.passages])}
    problem = f"has the task '{task}'" if task else "reports no task"
    raise InvalidRequest(f"model '{model}' {problem}: scores need a model with the task '{SCORE}' or '{EMBED}'")


def read_scores(outputs: Mapping[str, Array], pairs: Pairs, task: str, model: str) -> Array:
    if task == SCORE:
        scores = np.array(pick_output(outputs, "score", model)).ravel()
    else:
        vectors = pick_output(outputs, "embedding", model)
        scores = compute_cosines(vectors[: len(pairs.queries)], vectors[len(pairs.queries) :])
    if len(scores) != len(pairs.passages):
        raise InternalError(f"model '{model}' returned {len(scores)} scores for {len(pairs.passages)} passages")
    return scores


def rank(scores: Array, top_n: int | None = None) -> list[tuple[int, float]]:
    if top_n is not None and top_n < 1:
        raise InvalidRequest(f"top_n is {top_n}: it must be at least 1, or None for all")
    return rank_best_first(scores, top_n)


def is_tensor(items: Items) -> TypeGuard[Array]:
    """Return whether the items are an array for the model's input tensor, and not images or texts."""
    return isinstance(items, np.ndarray) and items.dtype.kind not in "OSU"


def make_item_inputs(items: Iterable[bytes] | Iterable[str]) -> dict[str, Array]:
    """Return the model input for images (bytes) or texts (str)."""
    if isinstance(items, bytes | str):
        raise InvalidRequest("classify takes a list of images (bytes) or texts (str), not one item: classify([image])")
    given: list[bytes | str] = list(items)
    if not given:
        raise InvalidRequest("there is nothing to classify: give at least one image or text")
    if all(isinstance(item, bytes) for item in given):
        return {"image": make_bytes_column(given)}
    if all(isinstance(item, str) for item in given):
        return {"text": make_bytes_column(given)}
    raise InvalidRequest("classify takes only images (bytes), only texts (str), or one array of numbers")


def make_tensor_inputs(array: Array, signature: ModelSignature) -> dict[str, Array]:
    """Return the array as the model's only input, converted to its datatype; do not convert floats to integers."""
    if len(signature.inputs) != 1 or signature.inputs[0].datatype == BYTES:
        takes = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in signature.inputs)
        raise InvalidRequest(f"model '{signature.name}' takes {takes}: one array is not enough, use infer()")
    spec = signature.inputs[0]
    try:
        return {spec.name: array.astype(NUMPY_TYPES[spec.datatype], casting="same_kind")}
    except TypeError as error:
        raise InvalidTensor(f"input '{spec.name}' needs {spec.datatype}: {error}") from error


def make_label_parameters(top_k: int | None) -> dict[str, Parameter]:
    """Return the parameter for the number of labels; None means the model's own setting."""
    if top_k is None:
        return {}
    if top_k < 1:
        raise InvalidRequest(f"top_k is {top_k}: it must be at least 1, or None for the model's own setting")
    return {"top_k": top_k}


def read_labels(outputs: Mapping[str, Array], model: str) -> list[Labels]:
    """Return the labels and scores of each item, the best first."""
    names, scores = pick_output(outputs, "label", model), pick_output(outputs, "score", model)
    return [
        [(name.decode(errors="replace"), float(score)) for name, score in zip(*row, strict=True)]
        for row in zip(names, scores, strict=True)
    ]
