"""Compares the answers of two variants of a model, such as before and after quantization.

A comparison's floor is its lowest acceptable value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from penstock.core import ranking
from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, Array, Tensor, to_array, unpack_bytes

TOP = 10
SAME_DB = 100.0  # the reported PSNR of equal images, which would be infinite
Answers = list[list[list[Tensor]]]  # by group and by request
Measured = tuple[float, dict[str, Any]]  # the value to compare with the floor, and details


@dataclass(frozen=True, slots=True)
class DistributionName:
    """The names of a distribution (mean and minimum of a value) in a comparison's details and in reports."""

    key: str  # in the details
    label: str
    digits: int


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """The comparison of a task's answers: a function, its unit, and the lowest acceptable result (`floor`)."""

    measure: str
    floor: float
    compare: Callable[[Answers, Answers], Measured]
    unit: str = ""
    spread: DistributionName | None = None  # None: experiments do not measure the accuracy of served models
    ranks_texts: bool = False  # the samples are two groups: texts of the first are queries that rank the second


def compare_embeddings(expected: Answers, actual: Answers) -> Measured:
    """Return the mean cosine of the vectors; with two groups of texts, also compare how the first ranks the second."""
    one, other = ([_join_vectors(group) for group in answers] for answers in (expected, actual))
    values = cosines(np.concatenate(one), np.concatenate(other))
    details: dict[str, Any] = {"cosine": distribution(values)}
    if len(one) > 1:
        details["ranks"] = rank_agreement(_cosine_matrix(*one), _cosine_matrix(*other))
    return float(values.mean()), details


def compare_scores(expected: Answers, actual: Answers) -> Measured:
    one, other = (
        np.array([[_flatten_numbers(answer)[0] for answer in group] for group in side]) for side in (expected, actual)
    )
    ranks = rank_agreement(one, other)
    difference = np.abs(one - other)
    details = {
        "ranks": ranks,
        "difference": {"max": round(float(difference.max()), 6), "mean": round(float(difference.mean()), 6)},
    }
    return ranks["spearman"], details


def compare_labels(expected: Answers, actual: Answers) -> Measured:
    pairs = list(zip(chain(*expected), chain(*actual), strict=True))
    best = [unpack_bytes(_find_tensor(a, "label"))[0] == unpack_bytes(_find_tensor(b, "label"))[0] for a, b in pairs]
    changes = [abs(float(_flat_array(a, "score")[0] - _flat_array(b, "score")[0])) for a, b in pairs]
    details = {"agree": sum(best), "of": len(best), "score_difference_max": round(max(changes), 6)}
    return float(np.mean(best)), details


def compare_images(expected: Answers, actual: Answers) -> Measured:
    values = [
        psnr_db(_decode_pixels(a), _decode_pixels(b)) for a, b in zip(chain(*expected), chain(*actual), strict=True)
    ]
    details = {"psnr_db": {"mean": round(float(np.mean(values)), 4), "min": round(min(values), 4)}}
    return float(np.mean(values)), details


def compare_tensors(expected: Answers, actual: Answers) -> Measured:
    one, other = (np.stack([_flatten_numbers(answer) for answer in chain(*side)]) for side in (expected, actual))
    values = cosines(one, other)
    largest = np.maximum(np.abs(one).max(axis=1), np.finfo(np.float64).tiny)
    errors = np.abs(one - other).max(axis=1) / largest
    details = {"cosine": distribution(values), "relative_error_max": round(float(errors.max()), 6)}
    return float(values.mean()), details


def _join_vectors(group: Sequence[Sequence[Tensor]]) -> Array:
    return np.concatenate([to_array(answer[0]) for answer in group])


def _cosine_matrix(queries: Array, passages: Array) -> Array:
    def unit(rows: Array) -> Array:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(lengths > 0, lengths, 1.0)

    found: Array = unit(queries) @ unit(passages).T
    return found


def _flatten_numbers(answer: Sequence[Tensor]) -> Array:
    """Return all numbers of an answer in one array."""
    arrays = [to_array(tensor).ravel() for tensor in answer if tensor.datatype != BYTES]
    if not arrays:
        raise ConfigError("the model's answers have no numbers to compare")
    return np.concatenate([array.astype(np.float64) for array in arrays])


def _find_tensor(answer: Sequence[Tensor], name: str) -> Tensor:
    return next(tensor for tensor in answer if tensor.name == name)


def _flat_array(answer: Sequence[Tensor], name: str) -> Array:
    return to_array(_find_tensor(answer, name)).ravel()


def _decode_pixels(answer: Sequence[Tensor]) -> Array:
    from penstock.tasks.images.decoding import decode, read_header  # imports Pillow, which most tasks do not need

    return np.asarray(decode(read_header(unpack_bytes(answer[0])[0])).image)


def cosines(expected: Array, actual: Array) -> Array:
    """Return the cosine of each pair of rows: 1 if both rows are zero, 0 if only one row is zero."""
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    values = ranking.compute_cosines(expected, actual)
    values[~expected.any(axis=1) & ~actual.any(axis=1)] = 1.0
    return values


def distribution(values: Array) -> dict[str, float]:
    low, lower, middle = np.percentile(values, (1, 5, 50))
    found = {"mean": values.mean(), "min": values.min(), "p1": low, "p5": lower, "p50": middle}
    return {name: round(float(value), 6) for name, value in found.items()}


def rank_agreement(expected: Array, actual: Array) -> dict[str, float]:
    """Return how similarly two sets of scores [queries, passages] rank the passages."""
    queries, passages = expected.shape
    best = np.argmax(expected, axis=1) == np.argmax(actual, axis=1)
    top = min(TOP, passages)
    overlaps = [len(_best_indices(a, top) & _best_indices(b, top)) / top for a, b in zip(expected, actual, strict=True)]
    orders = [spearman(a, b) for a, b in zip(expected, actual, strict=True)]
    return {
        "queries": queries,
        "passages": passages,
        "top1_agreement": round(float(best.mean()), 6),
        f"top{top}_overlap": round(float(np.mean(overlaps)), 6),
        "spearman": round(float(np.mean(orders)), 6),
        "spearman_min": round(float(np.min(orders)), 6),
    }


def spearman(expected: Array, actual: Array) -> float:
    """Return Spearman's rank correlation; equal values have the same rank."""
    one, other = _rank_values(expected), _rank_values(actual)
    one, other = one - one.mean(), other - other.mean()
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / product if product else float(np.array_equal(one, other))


def psnr_db(expected: Array, actual: Array) -> float:
    """Return the PSNR in decibels. Pixels are from 0 to 255."""
    error = float(np.mean((expected.astype(np.float64) - actual.astype(np.float64)) ** 2))
    return min(SAME_DB, float(10 * np.log10(255**2 / error))) if error else SAME_DB


def _best_indices(scores: Array, count: int) -> set[int]:
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


def _rank_values(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = ((ends - counts + ends - 1) / 2)[inverse]
    return ranks
