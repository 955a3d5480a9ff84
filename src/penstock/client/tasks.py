"""What is asked of the tasks to a request, and its answer to scores, ranks and labels: what both clients share."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict, TypeGuard

import numpy as np

from penstock.client.messages import ModelSignature, column, pick_output
from penstock.core.errors import InternalError, InvalidRequest, InvalidTensor
from penstock.core.ranking import best_first, cosines
from penstock.core.requests import Parameter
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array

Items = Iterable[bytes] | Iterable[str] | Array
Labels = list[tuple[str, float]]
SCORE, EMBED = "score", "embed"


class ImageOptions(TypedDict, total=False):
    """What may be asked of an image's answer, as keyword arguments; None: as the model has it."""

    format: str | None  # png, jpeg or webp
    quality: int | None  # of jpeg and webp, 1 to 100
    resolution: str | None  # a factor (2x), lines (1080p, 4k) or a frame (1920x1080)
    mode: str | None  # upscale or denoise


@dataclass(frozen=True, slots=True)
class Pairs:
    queries: list[str]  # one for all passages, or one for each
    passages: list[str]


def image_parameters(options: ImageOptions) -> dict[str, Parameter]:
    return {name: value for name, value in options.items() if isinstance(value, int | str)}


async def in_chunks(texts: Iterable[str] | AsyncIterable[str], size: int) -> AsyncIterator[list[str]]:
    """Waits only where the texts are awaited themselves."""
    if size < 1:
        raise InvalidRequest(f"batch is {size}: at least one text goes in a request")
    chunk: list[str] = []
    async for text in _awaited(texts):
        if not isinstance(text, str):
            raise InvalidRequest(f"there is a {type(text).__name__} among the texts: give str")
        chunk.append(text)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _awaited(texts: Iterable[str] | AsyncIterable[str]) -> AsyncIterator[str]:
    if isinstance(texts, AsyncIterable):
        async for text in texts:
            yield text
    else:
        for text in texts:
            yield text


def read_pairs(query: str | Iterable[str], passages: Iterable[str]) -> Pairs:
    if isinstance(passages, str):
        raise InvalidRequest("the passages are a list of texts: [text]")
    pairs = Pairs([query] if isinstance(query, str) else list(query), list(passages))
    if not pairs.passages:
        raise InvalidRequest("there are no passages: give at least one")
    if len(pairs.queries) not in (1, len(pairs.passages)):
        raise InvalidRequest(
            f"{len(pairs.queries)} queries for {len(pairs.passages)} passages: give one for all, or one for each"
        )
    return pairs


def score_inputs(pairs: Pairs, task: str, model: str) -> dict[str, Array]:
    if task == SCORE:
        return {"query": column(pairs.queries), "passage": column(pairs.passages)}
    if task == EMBED:
        return {"text": column([*pairs.queries, *pairs.passages])}
    does = f"does '{task}'" if task else "does not tell its task"
    raise InvalidRequest(f"model '{model}' {does}: scores need one that does '{SCORE}' or '{EMBED}'")


def read_scores(outputs: Mapping[str, Array], pairs: Pairs, task: str, model: str) -> Array:
    if task == SCORE:
        scores = np.array(pick_output(outputs, "score", model)).ravel()
    else:
        vectors = pick_output(outputs, "embedding", model)
        scores = cosines(vectors[: len(pairs.queries)], vectors[len(pairs.queries) :])
    if len(scores) != len(pairs.passages):
        raise InternalError(f"model '{model}' gave {len(scores)} scores for {len(pairs.passages)} passages")
    return scores


def rank(scores: Array, top_n: int | None = None) -> list[tuple[int, float]]:
    if top_n is not None and top_n < 1:
        raise InvalidRequest(f"top_n is {top_n}: give at least 1, or none for all")
    return best_first(scores, top_n)


def is_tensor(items: Items) -> TypeGuard[Array]:
    """Whether they are the numbers of a model's own input, rather than images or texts."""
    return isinstance(items, np.ndarray) and items.dtype.kind not in "OSU"


def item_inputs(items: Iterable[bytes] | Iterable[str]) -> dict[str, Array]:
    """Images are bytes, texts are str."""
    if isinstance(items, bytes | str):
        raise InvalidRequest("classify takes a list of images (bytes) or texts (str): classify([image])")
    given: list[bytes | str] = list(items)
    if not given:
        raise InvalidRequest("there is nothing to classify: give at least one image or text")
    if all(isinstance(item, bytes) for item in given):
        return {"image": column(given)}
    if all(isinstance(item, str) for item in given):
        return {"text": column(given)}
    raise InvalidRequest("classify takes images (bytes), texts (str) or one array of numbers, and no mixture")


def tensor_inputs(array: Array, signature: ModelSignature) -> dict[str, Array]:
    """The array as the model's only input, in its datatype where no kind of number is changed by that."""
    if len(signature.inputs) != 1 or signature.inputs[0].datatype == BYTES:
        takes = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in signature.inputs)
        raise InvalidRequest(f"model '{signature.name}' takes {takes}, and no array alone")
    spec = signature.inputs[0]
    try:
        return {spec.name: array.astype(NUMPY_TYPES[spec.datatype], casting="same_kind")}
    except TypeError as error:
        raise InvalidTensor(f"input '{spec.name}' takes {spec.datatype}: {error}") from error


def label_parameters(top_k: int | None) -> dict[str, Parameter]:
    """How many labels; none: as the model has it."""
    if top_k is None:
        return {}
    if top_k < 1:
        raise InvalidRequest(f"top_k is {top_k}: give at least 1, or none for the model's own")
    return {"top_k": top_k}


def read_labels(outputs: Mapping[str, Array], model: str) -> list[Labels]:
    """For each item its labels with their scores, the best first."""
    names, scores = pick_output(outputs, "label", model), pick_output(outputs, "score", model)
    return [
        [(name.decode(errors="replace"), float(score)) for name, score in zip(*row, strict=True)]
        for row in zip(names, scores, strict=True)
    ]
