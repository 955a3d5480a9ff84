"""How near a variant's answers are to those of the original in FP32, through the task itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from penstock.core import ranking
from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, Array, Tensor, to_array, unpack_bytes
from penstock.models.convert.samples import Samples
from penstock.models.loading import LoadedModel
from penstock.models.running import answer
from penstock.tasks.base import TaskRequest
from penstock.tasks.images.decoding import decode, read_header

TOP = 10
SAME_DB = 100.0  # of images without a difference, whose PSNR is infinite
Answers = list[list[list[Tensor]]]  # by group and by request
Measured = tuple[float, dict[str, Any]]  # what is held against the floor, and what else there is to tell


@dataclass(frozen=True, slots=True)
class Rule:
    """How a task's answers are compared, and the floor where none is asked for."""

    measure: str
    floor: float
    compare: Callable[[Answers, Answers], Measured]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Fidelity:
    measure: str
    value: float
    samples: int
    details: Mapping[str, Any] = field(default_factory=dict)
    unit: str = ""


def answer_all(model: LoadedModel, groups: Sequence[Sequence[TaskRequest]]) -> Answers:
    return [[answer(model, request) for request in group] for group in groups]


class Reference:
    """The original's answers, made once and held against those of every variant."""

    def __init__(self, task: str, original: LoadedModel, samples: Samples) -> None:
        self._task = task
        self._samples = samples
        self._answers = answer_all(original, samples.held_out)

    def compare(self, variant: LoadedModel) -> Fidelity:
        return compare_answers(self._task, self._answers, answer_all(variant, self._samples.held_out))


def compare_answers(task: str, expected: Answers, found: Answers) -> Fidelity:
    if _are_numbers(expected) and not _are_numbers(found):
        raise ConfigError("its answers are no numbers any more (NaN or infinite)")
    rule = rule_of(task)
    value, details = rule.compare(expected, found)
    return Fidelity(rule.measure, round(value, 6), sum(map(len, expected)), details, rule.unit)


def _embeddings(expected: Answers, found: Answers) -> Measured:
    """The first group asks; the second, where there is one, is ranked for each of its texts."""
    one, other = ([_vectors(group) for group in answers] for answers in (expected, found))
    values = cosines(np.concatenate(one), np.concatenate(other))
    details: dict[str, Any] = {"cosine": distribution(values)}
    if len(one) > 1:
        details["ranks"] = rank_agreement(_similarities(*one), _similarities(*other))
    return float(values.mean()), details


def _scores(expected: Answers, found: Answers) -> Measured:
    one, other = (np.array([[_numbers(answer)[0] for answer in group] for group in side]) for side in (expected, found))
    ranks = rank_agreement(one, other)
    difference = np.abs(one - other)
    details = {
        "ranks": ranks,
        "difference": {"max": round(float(difference.max()), 6), "mean": round(float(difference.mean()), 6)},
    }
    return ranks["spearman"], details


def _labels(expected: Answers, found: Answers) -> Measured:
    pairs = list(zip(chain(*expected), chain(*found), strict=True))
    best = [unpack_bytes(_named(a, "label"))[0] == unpack_bytes(_named(b, "label"))[0] for a, b in pairs]
    changes = [abs(float(_of(a, "score")[0] - _of(b, "score")[0])) for a, b in pairs]
    details = {"agree": sum(best), "of": len(best), "score_difference_max": round(max(changes), 6)}
    return float(np.mean(best)), details


def _images(expected: Answers, found: Answers) -> Measured:
    values = [psnr_db(_pixels(a), _pixels(b)) for a, b in zip(chain(*expected), chain(*found), strict=True)]
    details = {"psnr_db": {"mean": round(float(np.mean(values)), 4), "min": round(min(values), 4)}}
    return float(np.mean(values)), details


def _tensors(expected: Answers, found: Answers) -> Measured:
    one, other = (np.stack([_numbers(answer) for answer in chain(*side)]) for side in (expected, found))
    values = cosines(one, other)
    largest = np.maximum(np.abs(one).max(axis=1), np.finfo(np.float64).tiny)
    errors = np.abs(one - other).max(axis=1) / largest
    details = {"cosine": distribution(values), "relative_error_max": round(float(errors.max()), 6)}
    return float(values.mean()), details


_RULES: Mapping[str, Rule] = {
    "embed": Rule("mean cosine", 0.98, _embeddings),
    "score": Rule("mean rank correlation", 0.95, _scores),
    "classify": Rule("label agreement", 0.98, _labels),
    "upscale": Rule("mean PSNR", 40.0, _images, "dB"),
}
_TENSORS = Rule("mean cosine", 0.98, _tensors)


def rule_of(task: str) -> Rule:
    """A task that nobody knows is judged by its numbers."""
    return _RULES.get(task, _TENSORS)


def _are_numbers(answers: Answers) -> bool:
    tensors = (tensor for answer in chain(*answers) for tensor in answer if tensor.datatype != BYTES)
    return all(np.isfinite(to_array(tensor).astype(np.float64)).all() for tensor in tensors)


def _vectors(group: Sequence[Sequence[Tensor]]) -> Array:
    return np.concatenate([to_array(answer[0]) for answer in group])


def _similarities(asked: Array, ranked: Array) -> Array:
    def unit(rows: Array) -> Array:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(lengths > 0, lengths, 1.0)

    found: Array = unit(asked) @ unit(ranked).T
    return found


def _numbers(answer: Sequence[Tensor]) -> Array:
    """All numbers that an answer has, in a row."""
    arrays = [to_array(tensor).ravel() for tensor in answer if tensor.datatype != BYTES]
    if not arrays:
        raise ConfigError("its answers have no numbers to compare")
    return np.concatenate([array.astype(np.float64) for array in arrays])


def _named(answer: Sequence[Tensor], name: str) -> Tensor:
    return next(tensor for tensor in answer if tensor.name == name)


def _of(answer: Sequence[Tensor], name: str) -> Array:
    return to_array(_named(answer, name)).ravel()


def _pixels(answer: Sequence[Tensor]) -> Array:
    return np.asarray(decode(read_header(unpack_bytes(answer[0])[0])).image)


def cosines(expected: Array, found: Array) -> Array:
    """Row by row; of two rows of zeros it is 1, of one it is 0."""
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    values = ranking.cosines(expected, found)
    values[~expected.any(axis=1) & ~found.any(axis=1)] = 1.0
    return values


def distribution(values: Array) -> dict[str, float]:
    low, lower, middle = np.percentile(values, (1, 5, 50))
    found = {"mean": values.mean(), "min": values.min(), "p1": low, "p5": lower, "p50": middle}
    return {name: round(float(value), 6) for name, value in found.items()}


def rank_agreement(expected: Array, found: Array) -> dict[str, float]:
    """How far two sets of scores [queries, passages] would show a reader the same."""
    queries, passages = expected.shape
    best = np.argmax(expected, axis=1) == np.argmax(found, axis=1)
    top = min(TOP, passages)
    overlaps = [len(_best(a, top) & _best(b, top)) / top for a, b in zip(expected, found, strict=True)]
    orders = [spearman(a, b) for a, b in zip(expected, found, strict=True)]
    return {
        "queries": queries,
        "passages": passages,
        "top1_agreement": round(float(best.mean()), 6),
        f"top{top}_overlap": round(float(np.mean(overlaps)), 6),
        "spearman": round(float(np.mean(orders)), 6),
        "spearman_min": round(float(np.min(orders)), 6),
    }


def spearman(expected: Array, found: Array) -> float:
    """The correlation of the ranks; what is equal shares a rank."""
    one, other = _ranks(expected), _ranks(found)
    one, other = one - one.mean(), other - other.mean()
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / product if product else float(np.array_equal(one, other))


def psnr_db(expected: Array, found: Array) -> float:
    """Pixels are from 0 to 255."""
    error = float(np.mean((expected.astype(np.float64) - found.astype(np.float64)) ** 2))
    return min(SAME_DB, float(10 * np.log10(255**2 / error))) if error else SAME_DB


def _best(scores: Array, count: int) -> set[int]:
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = ((ends - counts + ends - 1) / 2)[inverse]
    return ranks
